"""The command line: ``vissl-zero config=<recipe> [+config/<group>=<file>] [config.A.B=value ...]``.

Subcommands: ``vissl-zero new``, ``list``, ``doctor``, ``plan``, ``explain``, ``verify``, ``lr-find``, ``replay``,
``checkpoint``, ``jobs`` and ``--version``.
Everything else is Hydra's: ``--cfg job``, ``-m`` for sweeps, ``hydra/launcher=...``, shell completion.

Exit codes: 0 done; 2 the input is wrong (a sentence per problem, no traceback); 1 a crash; 75, 130 saved and stopped.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from vissl_zero.commands.arguments import config_dirs
from vissl_zero.config.programs import PROGRAMS
from vissl_zero.errors import ConfigError, ProcessLostError, VisslZeroError, did_you_mean
from vissl_zero.imports import import_at_once
from vissl_zero.lifetime import SWEEP_VARIABLE, end_with_parent
from vissl_zero.reporting.lossy_output import tolerate_lost_output, why_stdout_is_incomplete
from vissl_zero.vissl.programs import ELSEWHERE

INTERRUPTED = 130
# Each is a function of the same name in a file of commands/, which gets the words that follow.
_COMMANDS = (
    "plan",
    "explain",
    "verify",
    "evaluate",
    "embed",
    "export",
    "checkpoint",
    "jobs",
    "runs",
    "compare",
    "data",
    "new",
    "lr-find",
    "replay",
)
_FILES = {"embed": "evaluate"}  # the file, where it is not named as the command
WORDS = ("list", "doctor", *_COMMANDS)
_PRINT_ONLY = {
    "--dry-run",
    "config.DRY_RUN",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--help",
    "-h",
    "--hydra-help",
    "--version",
}
HELP = """\
vissl-zero: large vision models trained from a YAML file, on whatever memory there is.

Train:
  vissl-zero config=<recipe> [+config/<group>=<file>] [config.A.B=value ...]
    config=quickstart/swav_digits                   a recipe; vissl-zero list recipes lists them
    config.DATA.TRAIN.DATA_PATHS=/my/photos         images: a folder, or [a,list,of,them]
    config.DATA.IMG_SIZE=96                         image size: side of the largest crop, pixels
    config.OPTIMIZER.lr=0.01                        peak learning rate; the schedule keeps its shape
    config.OPTIMIZER.weight_decay=0.05              weight decay
    config.OPTIMIZER.num_epochs=100                 epochs
    config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=64      images per process and micro-batch
    config.ZERO.LEVEL=3                             shard optimizer state (1), gradients (2), parameters (3)
    config.ZERO.LEVEL=fit                           the cheapest of these, and of offload, that fits the memory
    config.DISTRIBUTED.NUM_PROC_PER_NODE=2          processes
    config.SEED_VALUE=1                             seed
    config.CHECKPOINT.DIR=runs/mine                 the run folder

Begin with images of your own:
  vissl-zero new <name> [--images <folder>]         asks four questions and writes a short recipe that trains

Look before you train:
  vissl-zero config=<recipe> --dry-run              check everything and print the plan; train nothing
  vissl-zero config=<recipe> --cfg job              the whole composed configuration
  vissl-zero list recipes [--config-dir <folder>]   all recipes, also those in your own folder
  vissl-zero list methods|trunks|heads|losses|optimizers|schedulers|sources|transforms|hooks|loggers|engines
  vissl-zero plan config=<recipe> [--memory-gb X]   every way to run it: memory, time, and the cheapest that fits
  vissl-zero explain <recipe, file or folder>       for each key: used, without effect, unlike VISSL, refused
  vissl-zero verify config=<recipe>                 prove that sharding does not change what it trains
  vissl-zero lr-find config=<recipe>                a learning rate for it: a short training with a rate that rises
  vissl-zero doctor                                 what works on this machine, and why the rest does not

Use weights of any origin: a run folder, a file, timm:<name>, hf:<repo>, torchvision:<name>, torchhub:<name>:
  vissl-zero evaluate <weights> ... --data <folder>     kNN and a linear probe on class folders in train/ and val/
  vissl-zero embed <weights> <folder> --out X.npz       features of photos (.npz, .csv, .parquet ...)
  vissl-zero export <weights> --to timm --out <folder>  a folder that timm opens; also transformers, onnx, ...

Measure what was trained, under VISSL's names, with any recipe; nothing is trained:
  vissl-zero train_svm config=benchmark/svm config.MODEL.WEIGHTS_INIT.PARAMS_FILE=<run>   SVMs on features
  vissl-zero train_svm_low_shot ...                 SVMs on few images
  vissl-zero low_shot_test ...                      logistic regression on few images
  vissl-zero nearest_neighbor_test ...              kNN
  vissl-zero cluster_features_and_label ...         images labeled by k-means of their features
  vissl-zero instance_retrieval_test ...            images found by their features
  vissl-zero extract_cluster ...                    the prototype that each image is nearest to
  vissl-zero extract_features ...                   features to files
  vissl-zero extract_label_predictions ...          what the heads predict, to files

Look into what was trained:
  vissl-zero runs [folder] [--json]                 runs: state, progress, figures, the command that resumes each
  vissl-zero compare <run> <run> ...                runs side by side: keys, curves, figures over seeds
  vissl-zero replay <run>/bad_steps/<step>          a captured bad step again: which module overflows, on which batch
  vissl-zero checkpoint inspect|verify|diff|export|import ...   (vissl-zero checkpoint --help)

Look at images, and pack them into few large files, which DATA_PATHS then names:
  vissl-zero data check <folder, tars, table, ...>  classes, sizes, formats; broken files, copies; a picture
  vissl-zero data stats <folder, tars, table, ...>  mean and deviation of the pixels, for Normalize
  vissl-zero data pack <source> <out> --to webdataset|arrow|lmdb [--size 512]
  vissl-zero data bench config=<recipe> [--run <run folder>]     what loading costs; will training wait for it?

Runs submitted to SLURM:
  vissl-zero jobs list|logs|cancel ...              (vissl-zero jobs --help)

Sweep:
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3                    one job after the other
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3 hydra/launcher=local            side by side on this machine
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3 hydra/launcher=submitit_slurm   as jobs of a SLURM cluster

Under another launcher:
  torchrun --nproc-per-node 2 tools/run_distributed.py config=<recipe>

Exit codes: 0 done, 2 an error in your input, 1 a crash, 75 saved and stopped on request, 130 by Ctrl-C.
--hydra-help has Hydra's own flags, --version the version.
"""


_HELP = {
    "list": """\
vissl-zero list [recipes|methods|trunks|heads|losses|optimizers|schedulers|sources|transforms|hooks|loggers|engines]
  --config-dir <folder>   recipes of this folder too: <folder>/config/*.yaml

Lists the names that a recipe may use, with a sentence about each. Without a word: what can be listed.
""",
    "doctor": """\
vissl-zero doctor

Says what works on this machine, and why the rest does not: versions, processors, memory, GPUs, /dev/shm, SLURM. Takes
no arguments. Exit codes: 0 training works, 1 it does not.
""",
}
_PROGRAM_HELP = """\
vissl-zero {word} config=<recipe> config.MODEL.WEIGHTS_INIT.PARAMS_FILE=<run or weights> [config.A.B=value ...]

{what}. Nothing is trained. Results are printed, and are in summary.json of the run folder
(config.CHECKPOINT.DIR). --dry-run checks everything first. docs/benchmarks.md has the keys; vissl-zero list recipes
lists recipes of benchmark/.
"""
_MEASURES = {
    "extract_features": "Writes the features of all images to files",
    "extract_label_predictions": "Writes what the heads predict for all images to files",
    "train_svm": "Trains SVMs on the features of TRAIN and measures them on TEST",
    "train_svm_low_shot": "Trains SVMs on the features of few images and measures them on TEST",
    "nearest_neighbor_test": "Measures kNN on features: TEST's images among TRAIN's",
    "cluster_features_and_label": "Labels images by k-means of their features",
    "extract_cluster": "Writes the prototype that each image is nearest to",
    "low_shot_test": "Trains logistic regression on the features of few images and measures it on TEST",
    "instance_retrieval_test": "Finds images by their features and measures the order in which they come",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``vissl-zero`` command, or ``tools/run_distributed.py``; return the exit code."""
    if argv is None:
        # Only in a process of its own: what follows would change the process of a caller for good.
        # Taken out: it is meant for this process, and not for those that it starts.
        if sweep := os.environ.pop(SWEEP_VARIABLE, ""):
            end_with_parent(int(sweep))
        _speak_utf8()
    # With `... | head`, the run continues after the reader has closed the pipe.
    tolerate_lost_output()
    _find_own_modules()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        error = why_stdout_is_incomplete()
        if code == 0 and error is not None and not (arguments and _trains(arguments)):
            print(f"stdout: cannot be written ({error.strerror}). The output is incomplete.", file=sys.stderr)
            return 1
        return code
    except VisslZeroError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":  # the trace too, on request
            traceback.print_exc()
        print(error, file=sys.stderr)
        return 2
    except ProcessLostError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:  # argparse's --help, Hydra's own errors
        # Python itself prints such a text, and exits with 1.
        if isinstance(ended.code, str):
            raise
        return int(ended.code or 0)


def _trains(arguments: list[str]) -> bool:
    """Check whether there is more to a command than what it prints."""
    return arguments[0] not in (*WORDS, "--version") and not {word.split("=")[0] for word in arguments} & _PRINT_ONLY


def _find_own_modules() -> None:
    """Let ``config.IMPORTS`` name modules of the working directory, where a console script does not look."""
    if (here := str(Path.cwd())) not in sys.path:
        # Last, so that no file of the user's can hide a package.
        sys.path.append(here)


def _speak_utf8() -> None:
    """Restart in Python's UTF-8 mode where the locale has another encoding.

    Hydra could not read an umlaut there, and a run must find folders that were created under any locale.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    command = [os.fsencode(word) for word in (sys.executable, *sys.orig_argv[1:])]
    os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - this very program


def _dispatch(arguments: list[str]) -> int:
    word, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if {"--help", "-h"} & {*rest} and (word in _HELP or word in PROGRAMS):
        print(_HELP[word] if word in _HELP else _PROGRAM_HELP.format(word=word, what=_MEASURES[word]), end="")
        return 0
    if word in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if word in _COMMANDS:
        name = word.replace("-", "_")
        command = getattr(import_at_once(f"vissl_zero.commands.{_FILES.get(word, name)}"), name)
        is_jobs_help = word == "jobs" and {"--help", "-h"} & {*rest}  # its words have no help of their own
        return int(command(["--help"] if is_jobs_help else rest))
    if word == "list":
        from vissl_zero.commands.list import list_kind

        rest, folders = config_dirs(rest)
        _no_more_than(1, word, rest)
        return list_kind(rest[0] if rest else "", folders)
    if word == "doctor":
        from vissl_zero.commands.doctor import doctor

        _no_more_than(0, word, rest)
        return doctor()
    if word == "--version":
        from vissl_zero.version import __version__

        _no_more_than(0, word, rest)
        print(f"vissl_zero {__version__}")
        return 0
    if word in PROGRAMS:
        from vissl_zero.commands.train import train

        return train([f"engine_name={word}", *rest])
    _refuse_unknown(word)
    if {"--help", "-h"} & {*arguments}:  # Hydra's would take ten seconds to list every group and key
        print(HELP, end="")
        return 0
    from vissl_zero.commands.train import train

    return train(arguments)


def _refuse_unknown(word: str) -> None:
    """Refuse a first word that is no override, flag or command of ours."""
    if not word or word[0] in "-+~" or "=" in word:
        return
    if word in ELSEWHERE:
        raise ConfigError(f"vissl-zero {word}: is not here. {ELSEWHERE[word]}")
    if word in ("train", "run", "fit", "pretrain"):
        raise ConfigError(
            f"vissl-zero {word}: is not a command: training has no word. Write vissl-zero config=<recipe>."
        )
    words = [*WORDS, *PROGRAMS]
    known = f"must be config=<recipe> or one of {', '.join(words)}.{did_you_mean(word, words)}"
    raise ConfigError(f"vissl-zero {word}: {known} See vissl-zero --help.")


def _no_more_than(count: int, word: str, rest: list[str]) -> None:
    if len(rest) > count:
        raise ConfigError(f"vissl-zero {word}: takes no {rest[count]!r}. Leave it out; see vissl-zero --help.")


if __name__ == "__main__":
    sys.exit(main())
