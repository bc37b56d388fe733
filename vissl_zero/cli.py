"""The command line: ``vissl-zero config=<recipe> [+config/<group>=<file>] [config.A.B=value ...]``.

Other words first: ``vissl-zero list <kind>``, ``doctor``, ``verify``, ``checkpoint``, ``--version``. Everything else
is Hydra's: ``--cfg job``, ``-m`` for sweeps, ``hydra/launcher=...``, shell completion.

Exit codes: 0 done; 2 the input is wrong (a sentence per problem, no traceback); 1 a crash; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vissl_zero.errors import VisslZeroError

if TYPE_CHECKING:
    from omegaconf import DictConfig

INTERRUPTED = 130
STOPPED = 75  # saved and stopped because it was asked to; as engine/stopping.py has it
HELP = """\
vissl-zero: large vision models trained from a YAML file, on whatever memory there is.

Train:
  vissl-zero config=<recipe> [+config/<group>=<file>] [config.A.B=value ...]
    config=quickstart/swav_digits                   a recipe; vissl-zero list recipes lists them
    config.ZERO.LEVEL=3                             shard optimizer state (1), gradients (2), parameters (3)
    config.DISTRIBUTED.NUM_PROC_PER_NODE=2          processes
    config.DATA.TRAIN.DATA_PATHS=[/my/photos]       images
    config.CHECKPOINT.DIR=runs/mine                 the run folder

Look before you train:
  vissl-zero config=<recipe> --dry-run              check everything, print the plan, start nothing
  vissl-zero config=<recipe> --cfg job              the whole composed configuration
  vissl-zero config=<recipe> --help                 the same, with Hydra's hints
  vissl-zero list recipes|trunks|heads|losses|optimizers|schedulers|sources|transforms|hooks|engines
  vissl-zero verify config=<recipe>                 prove that sharding does not change what it trains
  vissl-zero doctor                                 what works on this machine, and why the rest does not

Look into what was trained:
  vissl-zero checkpoint inspect|verify|diff|export|import ...   (vissl-zero checkpoint --help)

Sweep:
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3                    one job after the other
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3 hydra/launcher=local            side by side on this machine
  vissl-zero -m config=<recipe> config.ZERO.LEVEL=0,3 hydra/launcher=submitit_slurm   as jobs of a SLURM cluster

Under another launcher:
  torchrun --nproc-per-node 2 tools/run_distributed.py config=<recipe>

Exit codes: 0 done, 2 your input, 1 a crash, 130 interrupted. --hydra-help has Hydra's own flags, --version the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``vissl-zero`` command and of ``tools/run_distributed.py``; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except VisslZeroError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `vissl-zero list trunks | head -3`: who reads has enough. Without this, Python complains again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    word = arguments[0] if arguments else ""
    if word in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if word == "--version":
        from vissl_zero import __version__

        print(f"vissl_zero {__version__}")
        return 0
    if word == "doctor":
        from vissl_zero.commands.doctor import doctor

        return doctor()
    if word == "list":
        from vissl_zero.commands.list import list_kind

        return list_kind(arguments[1] if len(arguments) > 1 else "")
    if word == "verify":
        from vissl_zero.commands.verify import verify

        return verify(arguments[1:])
    if word == "checkpoint":
        from vissl_zero.commands.checkpoint import checkpoint

        return checkpoint(arguments[1:])
    return _train(arguments)


def _train(arguments: list[str]) -> int:
    """Compose through ``@hydra.main`` and run every job of it (one, or a sweep); the worst exit code of all jobs."""
    import hydra

    from vissl_zero.config.explain import EXPLAINABLE, explain
    from vissl_zero.config.store import register
    from vissl_zero.launch.side_by_side import register_launcher
    from vissl_zero.launch.sweep import finish_sweep

    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path="pkg://vissl_zero.conf", config_name="defaults")
    def job(cfg: DictConfig) -> int:
        code = _run_job(cfg)
        if code == INTERRUPTED:
            raise KeyboardInterrupt  # ends a sweep
        if code == STOPPED and "SUBMITIT_EXECUTOR" not in os.environ:
            raise SystemExit(STOPPED)  # ends a sweep too, but for one whose jobs are queued again one by one
        codes.append(code)
        return code

    register()
    register_launcher()
    sys.path.append(str(Path.cwd()))  # modules that config.IMPORTS names; a console script does not look there
    arguments = ["config.DRY_RUN=true" if word == "--dry-run" else word for word in arguments]
    sys.argv = [sys.argv[0], *_quiet_on_other_ranks(arguments)]
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own trace and exits with 1
    try:
        job()
    except EXPLAINABLE as error:
        raise explain(error) from error
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        swept = finish_sweep()
    return max([*codes, swept or 0])


def _run_job(cfg: object) -> int:
    """One composed job: check, resolve, run. Errors end it, not the sweep it belongs to."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig

    assert isinstance(cfg, DictConfig)
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode != RunMode.MULTIRUN or cfg.config.DRY_RUN:  # a dry run leaves nothing behind
        return _compose_and_run(cfg, str(hydra_cfg.runtime.choices["config"]), folder)
    from vissl_zero.launch.sweep_job import run_job_of_sweep

    return run_job_of_sweep(
        folder,
        list(hydra_cfg.overrides.task),
        lambda: _compose_and_run(cfg, str(hydra_cfg.runtime.choices["config"]), folder),
        int(cfg.config.SLURM.MAX_REQUEUES),
    )


def _compose_and_run(cfg: DictConfig, recipe: str, output_dir: Path) -> int:
    from vissl_zero.config.compose import typed
    from vissl_zero.config.resolve import resolve
    from vissl_zero.launch.run import run

    try:
        composed = typed(cfg, recipe)
        plan = resolve(composed.run, output_dir, recipe=composed.recipe, written=composed.written)
        code = run(plan, composed.user_yaml(), composed.node_id)
        if composed.run.DRY_RUN:
            _remove_if_empty(output_dir)
        return code
    except VisslZeroError as error:
        print(error, file=sys.stderr)
        _remove_if_empty(output_dir)
        return 2


def _remove_if_empty(folder: Path) -> None:
    """Take back the folder under runs/ that Hydra makes before a run is checked."""
    if folder.is_relative_to(Path("runs").absolute()):
        with suppress(OSError):  # not empty
            folder.rmdir()


def _quiet_on_other_ranks(arguments: list[str]) -> list[str]:
    """Under torchrun every rank composes; only rank 0 may leave Hydra's output folder behind."""
    if os.environ.get("RANK", "0") == "0" or any(word.startswith("hydra.run.dir=") for word in arguments):
        return arguments
    return [*arguments, "hydra.run.dir=."]


if __name__ == "__main__":
    sys.exit(main())
