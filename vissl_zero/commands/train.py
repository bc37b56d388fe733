"""``vissl-zero config=<recipe> ...``: one run or a sweep of runs, composed by ``@hydra.main``."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vissl_zero.commands.list import completed_recipes
from vissl_zero.config.compose import (
    BEFORE_A_JOB,
    EXPLAINABLE,
    IN_A_LIST,
    Composed,
    explained,
    new_folders,
    plain_words,
    register,
    remember_new,
)
from vissl_zero.config.override_words import as_word
from vissl_zero.config.recipes import recipe_names
from vissl_zero.engine.stopping import INTERRUPTED, STOPPED
from vissl_zero.errors import ConfigError, Problem, VisslZeroError, did_you_mean
from vissl_zero.launch.run_list import COMMAND_MARK
from vissl_zero.launch.slurm import refused_sweep
from vissl_zero.launch.sweep import finish_sweep, objective, read_metric, register_launcher
from vissl_zero.lifetime import run_in_subprocess
from vissl_zero.planner.fit_plans import FitOption, FitPlans, FitRun, with_option
from vissl_zero.resolve.host import free_memory
from vissl_zero.resolve.inactive import SEED_BESIDE_SEEDS
from vissl_zero.resolve.resolved import ResolvedRun


def train(arguments: Sequence[str]) -> int:  # noqa: C901 - every way that Hydra ends
    """Compose through ``@hydra.main``, and run the job or the sweep. Return the worst exit code of all jobs.

    Args:
        arguments: arguments of the command line.
    Raises:
        VisslZeroError: the arguments are wrong.
    """
    if recipes := completed_recipes(arguments):
        print("\n".join(recipes))
        return 0
    codes: list[int] = []
    in_job = False

    @hydra.main(version_base="1.3", config_path="pkg://vissl_zero.conf", config_name="defaults")
    def job(cfg: DictConfig) -> int | float | None:
        nonlocal in_job
        in_job = True
        metric = objective(HydraConfig.get(), cfg.config)
        code = _run_job(cfg)
        if code == INTERRUPTED:
            raise KeyboardInterrupt  # ends a sweep
        if code == STOPPED and "SUBMITIT_EXECUTOR" not in os.environ:
            raise SystemExit(STOPPED)  # ends a sweep too, unless its jobs are requeued one by one
        codes.append(code)
        result: int | float | None = code
        if metric:  # after a refusal, the folder may have the summary of another job
            result = read_metric(Path(HydraConfig.get().runtime.output_dir), metric) if code == 0 else None
        in_job = False
        return result

    register()
    register_launcher()
    remember_new(Path("runs"))
    warnings.filterwarnings("error", message="provider=hydra.searchpath")  # a folder is missing
    flags, overrides, folders = _for_hydra(arguments)
    sys.argv = [sys.argv[0], *flags, *overrides]
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own trace and exits with 1
    try:
        job()
    except RecursionError as error:
        if in_job:
            raise
        raise explained(error, overrides, folders) from None
    except EXPLAINABLE as error:
        raise explained(error, overrides, folders) from error
    except (*BEFORE_A_JOB, *IN_A_LIST) as error:
        if in_job:
            raise
        raise explained(error, overrides, folders) from error
    except Exception as error:
        if in_job or (refused := refused_sweep(error)) is None:
            raise
        raise refused from error
    except SystemExit as end:
        if end.code != 1 or in_job:
            raise
        return 2  # Hydra has reported what is wrong with one of its own flags
    finally:
        if before is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
        swept = finish_sweep()
    if not codes and swept is None and {"-m", "--multirun"} & {*arguments}:
        must = "must make a job: nothing is swept, or a glob() matches nothing"
        raise ConfigError([Problem("command line", "", must, "See vissl-zero list recipes.")])
    return max([*codes, swept or 0])


_KEY_AS_FLAG = re.compile(r"--config(\.[^=]*)?(=.*)?")


def _for_hydra(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort arguments for Hydra's parser, flags before overrides. Return them, and the folders of --config-dir.

    Raises:
        ConfigError: a flag is unknown or would replace our defaults, or there are blanks around "=".
    """
    for before, word in pairwise(arguments):
        if word.startswith("=") and "=" not in before:
            must = "must be one word: key=value without blanks"
            fix = f"Write {before}={word[1:] or '<value>'}; a value with blanks needs quotes: \"key='a b'\"."
            raise ConfigError([Problem("command line", repr(f"{before} {word}"), must, fix)])
    for word, value in pairwise([*arguments, ""]):
        # argparse would take it for the beginning of three of Hydra's flags.
        if _KEY_AS_FLAG.fullmatch(word):
            key, equals, _ = word.removeprefix("--").partition("=")
            written = (
                word.removeprefix("--") if equals else f"{key}={value if value[:1] not in ('', '-') else '<value>'}"
            )
            raise ConfigError([Problem("command line", word, "must be a key, not a flag", f"Write {written}.")])
    words = ["config.DRY_RUN=true" if word == "--dry-run" else word for word in arguments]
    parser = get_args_parser()
    # argparse gives the overrides up to the next flag to the parser's list, and leaves those after it in ``rest``.
    parsed, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            near = did_you_mean(word.split("=")[0], ["--dry-run", *parser._option_string_actions])
            raise ConfigError(f"command line: {word} is not a flag.{near} See vissl-zero --help and --hydra-help.")
    if parsed.config_name:
        must, fix = "must be left out: it replaces the defaults of all recipes", f"Write config={parsed.config_name}."
        raise ConfigError([Problem("--config-name", repr(parsed.config_name), must, fix)])
    overrides = [*parsed.overrides, *rest]
    flags = [word for word in words if word not in overrides]
    folders = [parsed.config_dir] if parsed.config_dir else []
    overrides = [_recipes_of_glob(word, folders) for word in plain_words(overrides)]
    if "config.DRY_RUN=true" in overrides:  # nothing is started, so the jobs of a sweep are checked here
        overrides = [word for word in overrides if not word.startswith(("hydra/launcher=", "hydra.launcher."))]
    is_other_rank = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys() and os.environ["RANK"] != "0"
    if is_other_rank and not any(word.startswith("hydra.run.dir=") for word in overrides):
        overrides.append("hydra.run.dir=.")  # under torchrun every rank composes: only rank 0 may make a folder
    return flags, overrides, folders


def _recipes_of_glob(word: str, folders: Sequence[str]) -> str:
    """Expand ``config=glob(pretrain/*)`` to a list: Hydra does not look into the folders of a group."""
    if not word.startswith("config=glob("):
        return word
    glob = OverridesParser.create().parse_override(word).value()
    assert isinstance(glob, Glob)
    matching = glob.filter(recipe_names(folders))
    return f"config={','.join(matching)}" if matching else word


def _run_job(cfg: DictConfig) -> int:
    """Check, resolve and run a composed job. Return its exit code. An error ends the job, but not its sweep."""
    hydra_cfg = HydraConfig.get()
    folder, recipe = Path(hydra_cfg.runtime.output_dir), str(hydra_cfg.runtime.choices.get("config") or "several")
    if hydra_cfg.job.chdir:
        must = "must be false: the paths of a recipe are relative to the folder where the command is given"
        print(Problem("hydra.job.chdir", "true", must, "Leave it out."), file=sys.stderr)
        return 2
    if cfg.config.SEEDS:
        return _train_seeds(cfg.config, folder, is_sweep=hydra_cfg.mode == RunMode.MULTIRUN)
    if hydra_cfg.mode != RunMode.MULTIRUN or cfg.config.DRY_RUN:  # a dry run leaves nothing behind
        return _compose_and_run(cfg, recipe, folder)
    from vissl_zero.launch.sweep import run_job_of_sweep

    return run_job_of_sweep(
        folder,
        list(hydra_cfg.overrides.task),
        lambda: _compose_and_run(cfg, recipe, folder),
        int(cfg.config.SLURM.MAX_REQUEUES),
    )


def _train_seeds(cfg: DictConfig, folder: Path, is_sweep: bool) -> NoReturn:
    """Replace this process by the sweep over SEED_VALUE that ``config.SEEDS`` means.

    Args:
        cfg: the block ``config``, with ``SEEDS``.
        folder: run folder, which becomes the sweep's folder.
        is_sweep: whether this is already a job of a sweep.
    Raises:
        ConfigError: the seeds are wrong, or this process is one of several ranks.
    """
    seeds: Sequence[int] = cfg.SEEDS
    fix = "Correct it."
    must = ""
    if len({*seeds}) < len(seeds) or min(seeds) < 0:
        must = "must be different whole numbers from 0"
    elif is_sweep:
        must, fix = "must be empty in a sweep", "Sweep over config.SEED_VALUE beside the other keys."
    elif {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        must, fix = "must be empty under torchrun", "Start it with vissl-zero, which starts the processes of each run."
    if must:
        _remove_if_empty(folder)
        raise ConfigError([Problem("config.SEEDS", f"[{', '.join(map(str, seeds))}]", must, fix)])
    if cfg.SEED_VALUE:
        print(f"note: config.SEED_VALUE has no effect: {SEED_BESIDE_SEEDS}.")
    _remove_if_empty(folder)  # the sweep makes it again, and would not remove a folder that exists
    ours = ("config.SEEDS=", "+config.SEEDS=", "config.CHECKPOINT.DIR=", "hydra.run.dir=")
    words = [word for word in sys.argv[1:] if not word.startswith(ours)]
    swept = ",".join(map(str, seeds))
    words += ["config.SEEDS=[]", f"config.SEED_VALUE={swept}", f"hydra.sweep.dir={as_word(folder)}"]
    # exec throws away what Python has not yet written.
    sys.stdout.flush()
    # Hydra has composed this run already and cannot start a sweep inside it. exec keeps the process id, which
    # schedulers and shells watch.
    os.execv(sys.executable, [sys.executable, "-m", "vissl_zero.cli", "-m", *words])  # noqa: S606 - this very program


def _compose_and_run(cfg: DictConfig, recipe: str, output_dir: Path) -> int:
    from vissl_zero.config.compose import typed
    from vissl_zero.launch.run import run

    try:
        # Not resolved, so that ${...} in an override stays as written.
        overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        assert isinstance(overrides, list)
        sources = HydraConfig.get().runtime.config_sources
        folders = [Path(source.path) for source in reversed(sources) if source.schema == "file"]
        composed = typed(cfg, recipe, overrides, folders)
        fit = _fit(composed, output_dir) if str(composed.run.ZERO.LEVEL) == "fit" else None
        plan = fit.choice.run if fit else _resolved(composed, output_dir)
        named = [source.path for source in sources if source.provider == "command-line"]
        words = ["vissl-zero", *(word for path in named for word in ("--config-dir", path)), *map(str, overrides)]
        user_yaml = f"{composed.user_yaml()}{COMMAND_MARK}{shlex.join(words)}\n"
        code = run(plan, user_yaml, composed.node_id, fit)
        if composed.run.DRY_RUN:
            _remove_if_empty(output_dir)
        return code
    except VisslZeroError as error:
        print(error, file=sys.stderr)
        _remove_if_empty(output_dir)
        return 2


def _fit(composed: Composed, output_dir: Path) -> FitRun:
    """Decide ``ZERO.LEVEL: fit`` in another process, because that imports torch and builds the model."""
    plans = run_in_subprocess(_fit_plans, composed, output_dir, free_memory())

    def resolved(option: FitOption, why: str) -> ResolvedRun:
        return _resolved(with_option(composed, option, why), output_dir)

    return FitRun(plans, resolved)


def _fit_plans(composed: Composed, output_dir: Path, free_bytes: int) -> FitPlans:
    from vissl_zero.planner.planning import fit_plans

    return fit_plans(composed, output_dir, free_bytes)


def _resolved(composed: Composed, output_dir: Path) -> ResolvedRun:
    from vissl_zero.resolve.resolve import resolve

    return resolve(composed.run, output_dir, recipe=composed.recipe, written=composed.written, notes=composed.notes)


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder that Hydra makes before a run is checked, if it is empty."""
    with suppress(OSError):  # not empty
        while folder in new_folders or Path("runs").absolute() in folder.parents:
            folder.rmdir()
            folder = folder.parent
