"""A sweep: checks of its folders, its summary, and the launcher ``hydra/launcher=local``. Imports no torch.

The launcher runs jobs in parallel on this machine, as many as its cores or GPUs allow. Each job is a process of its
own (``python -m vissl_zero.cli``) with its own cores and GPUs, and starts its own ranks. Its output is in
``output.log`` of its folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.compose import remember_new
from vissl_zero.config.override_words import pairs_of
from vissl_zero.engine import stopping
from vissl_zero.engine.stopping import JobNote, is_done, read_jobs, read_note, read_summary
from vissl_zero.errors import ConfigError, LaunchError, Problem, VisslZeroError, did_you_mean
from vissl_zero.launch.slurm import private_folder, requeue
from vissl_zero.lifetime import SWEEP_VARIABLE
from vissl_zero.resolve.followed_figure import unknown_number
from vissl_zero.resolve.host import Host, this_host
from vissl_zero.resolve.placement_plan import is_unsafe
from vissl_zero.resolve.saved import leaves

_NUMBERED = "${hydra:job.num}"  # hydra.sweep.subdir of defaults.yaml
# Files of an attempt that saved no checkpoint; the next attempt would refuse them, or append to them.
_LEFTOVERS = ("metrics.jsonl", "summary.json", "tensorboard", "logs")


def _require_own(jobs: Mapping[Path, Sequence[str]]) -> None:
    """Require that no folder has a run with other overrides. The order of overrides does not matter.

    Args:
        jobs: folder -> overrides of its job.
    Raises:
        LaunchError: some folders have another run; all are named.
    """
    foreign = [folder for folder, overrides in jobs.items() if _is_foreign(folder, overrides)]
    if not foreign:
        return
    first, note = foreign[0], read_note(foreign[0])
    wanted, noted = pairs_of(jobs[first]), pairs_of(note.overrides) if note else {}
    other = " ".join(f"{key}={value}" for key, value in wanted.items() if noted.get(key) != value)
    missing = " ".join(f"{key}={value}" for key, value in noted.items() if wanted.get(key) != value)
    holds = "hold different jobs" if len(foreign) > 1 else "holds a different job"
    key = "config.CHECKPOINT.DIR" if "config.SEEDS" in wanted else "hydra.sweep.dir"  # what the user wrote
    raise LaunchError(
        f"{key}: {', '.join(map(str, foreign))} {holds} ({missing or 'nothing'} there, "
        f"{other or 'nothing'} here). Name another folder, or repeat the command that was started there to run the "
        "missing jobs."
    )


def _is_foreign(folder: Path, overrides: Sequence[str]) -> bool:
    note = read_note(folder)
    if note is None:
        return (folder / "metrics.jsonl").exists()
    return pairs_of(note.overrides) != pairs_of(overrides)


def claim(folder: Path, overrides: Sequence[str]) -> bool:
    """Prepare a folder for a job and return False if the job is done already.

    An interrupted attempt resumes from its checkpoint, or starts from scratch if it has none.

    Raises:
        LaunchError: the folder has a run with other overrides.
    """
    _require_own({folder: overrides})
    if is_done(folder):
        return False
    if not any((folder / "checkpoints").glob("*")):
        for name in _LEFTOVERS:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    JobNote(list(overrides)).write(folder)
    return True


def run_job_of_sweep(folder: Path, overrides: Sequence[str], run: Callable[[], int], max_requeues: int) -> int:
    """Run a job in this process, unless it is done already. An error of a job does not end the sweep.

    Args:
        folder: folder of the job.
        overrides: overrides as Hydra gives them.
        run: function that runs the job; returns its exit code.
        max_requeues: most requeues of a SLURM job that saved and stopped.
    Returns:
        The job's exit code, as in its note; if the job succeeded, but the sweep was asked to stop meanwhile, the exit
        code of stopping.
    """
    try:
        if any(word.lstrip("+").startswith("config.CHECKPOINT.DIR=") for word in overrides):
            raise LaunchError(
                "config.CHECKPOINT.DIR: each job of a sweep gets its own folder. Leave it out, and name the sweep's "
                "folder with hydra.sweep.dir=<folder>."
            )
        if not claim(folder, overrides):
            print(f"done before: {folder}")
            return 0
    except VisslZeroError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        code = run()
    except Exception:  # noqa: BLE001 - an error in one job must not keep the others from running
        traceback.print_exc()
        code = 1
    executor = os.environ.get("SUBMITIT_EXECUTOR")
    if code == stopping.STOPPED and executor == "slurm":
        code = requeue(max_requeues)
    JobNote(list(overrides), code).write(folder)
    stop = stopping.requested_stop()
    return stop.exit_code if code == 0 and stop is not None and executor is None else code


def objective(hydra: Any, config: Any) -> str:
    """Return the name of the metric by which a sweeper searches (``hydra/sweeper=optuna``); "" if none searches.

    Args:
        hydra: Hydra's own configuration.
        config: the block ``config`` of a job.
    Raises:
        ConfigError: a sweeper searches, but the metric is missing or unknown, or the job does not train.
    """
    sweeper = str(hydra.runtime.choices.get("hydra/sweeper", "basic"))
    if hydra.mode != RunMode.MULTIRUN or sweeper == "basic":
        return ""
    if config.DRY_RUN:
        must, fix = f"must be false: {sweeper} searches by a metric of training", f"Leave out hydra/sweeper={sweeper}."
        raise ConfigError([Problem("config.DRY_RUN", "True", must, fix)])
    if not config.OBJECTIVE:
        must, fix = f"must name the metric that {sweeper} searches by", "Write config.OBJECTIVE=loss_last, for example."
        raise ConfigError([Problem("config.OBJECTIVE", "", must, fix)])
    if problem := unknown_number(str(config.OBJECTIVE), config.HOOKS.EXTRA):
        raise ConfigError([problem])
    return str(config.OBJECTIVE)


def _check_search(config: DictConfig) -> None:
    """Refuse a search whose every trial would fail, before the first trial.

    Raises:
        ConfigError: see ``objective``; or the number of trials is below 1.
    """
    for key in ("hydra.sweeper.n_trials", "hydra.sweeper.n_jobs"):
        number = OmegaConf.select(config, key)
        if number is not None and number < 1:
            raise ConfigError([Problem(key, str(number), "must be at least 1", f"Write {key}=1, or more.")])
    if config.hydra.runtime.choices.get("config") not in (None, "???"):  # else recipes are swept
        objective(config.hydra, config.config)


def read_metric(folder: Path, name: str) -> float | None:
    """Read a metric of a job's ``summary.json``; None: the job has no summary, which a sweeper counts as a failure.

    Raises:
        ConfigError: the summary has no such metric.
    """
    summary = read_summary(folder)
    if not summary:
        return None
    numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
    if name not in numbers:
        near = did_you_mean(name, numbers) or f" There are {', '.join(sorted(numbers))}."
        raise ConfigError([Problem("config.OBJECTIVE", repr(name), "must be a number in summary.json", near.strip())])
    return float(numbers[name])


_sweep_dir: Path | None = None
_scratch: TemporaryDirectory[str] | None = None  # Hydra's files of a sweep in a dry run


class SweepFolder(Callback):
    """The callback that Hydra calls in the process that the user started."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check a sweep before its first job, store its folder, and make submitit's folder private.

        Raises:
            SystemExit: the folder has other jobs, a search has no metric, other users can write to submitit's folder,
                or a string for sbatch has several lines. (Hydra continues after any other exception of a callback.)
        """
        global _sweep_dir, _scratch
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        submitted = OmegaConf.select(config, "hydra.launcher.submitit_folder")
        try:
            _check_search(config)
            jobs = _jobs(config, folder)
            _require_own(jobs)
            if config.config.DRY_RUN:
                for path in jobs:
                    remember_new(path)  # Hydra makes these folders
                # Hydra writes into a sweep's folder, of which a dry run must leave nothing.
                _scratch = TemporaryDirectory()
                config.hydra.sweep.dir = _scratch.name
                return
            if submitted is not None:
                _check(OmegaConf.to_container(config.hydra.launcher, resolve=True))
                logs = private_folder(Path(str(submitted).split("%")[0]).absolute())
                print(f"sweep folder  {folder}\nlogs          {logs}", flush=True)
        except VisslZeroError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from error
        _sweep_dir = folder


def _jobs(config: DictConfig, sweep_dir: Path) -> dict[Path, list[str]]:
    """Return folder -> overrides of all jobs; empty for a search, or if the user names the folders."""
    sweep = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    assert isinstance(sweep, dict)
    if config.hydra.runtime.choices.get("hydra/sweeper") != "basic" or sweep["subdir"] != _NUMBERED:
        return {}
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    words = [word for word in words if not word.startswith("config.DRY_RUN=")]  # as in a sweep that trains
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
    except HydraException:  # the sweeper will report it
        return {}
    return {sweep_dir / str(number): overrides for number, overrides in enumerate(jobs)}


def _check(launcher: Any) -> None:
    """Refuse strings that would end a line of the sbatch script; ``setup`` is shell code, and may have lines."""
    must = "must be one line of printable text: the next line would be read as an option or a command"
    problems = [
        Problem(f"hydra.launcher.{key}", repr(value), must, "Remove the line breaks.")
        for key, value in leaves(launcher)
        if not key.startswith("setup") and is_unsafe(value)
    ]
    if problems:
        raise ConfigError(problems)


def finish_sweep() -> int | None:
    """Write and print the summary of this process's sweep. Return its worst exit code, or None without a sweep."""
    global _sweep_dir, _scratch
    folder, _sweep_dir = _sweep_dir, None
    if _scratch is not None:
        _scratch.cleanup()
        _scratch = None
    if folder is None or not folder.is_dir():
        return None
    notes = read_jobs(folder)
    if not notes:
        # If all jobs were refused, Hydra leaves this file.
        if {path.name for path in folder.iterdir()} == {"multirun.yaml"}:
            (folder / "multirun.yaml").unlink()
            folder.rmdir()
        return None
    from vissl_zero.reporting.sweep_summary import (
        CSV_NAME,
        PLOT_NAME,
        SEEDS_NAME,
        collect,
        join_seeds,
        print_sweep,
        write_sweep,
    )

    rows = collect(folder)
    write_sweep(folder, rows)
    print()
    print_sweep(rows)
    files = [CSV_NAME, PLOT_NAME, *([SEEDS_NAME] if join_seeds(folder, rows) else [])]
    print(f"\nsweep folder  {folder}  ({', '.join(files)})")
    missing = sum(not is_done(path) for path in notes)
    again = f"The same command with hydra.sweep.dir={folder} does those."
    if stopping.requested_stop() is not None:
        print(f"Stopped: some jobs are unfinished or were not started. {again}")
    elif missing:
        print(f"{missing} of {len(notes)} jobs are not done. {again}")
    return max((note.code or 0 for note in notes.values()), default=0)


_OUTPUT = "output.log"
_FAREWELL_S = 60.0  # for jobs to save and stop


@dataclass
class LocalLauncherConfig:
    """The keys of ``hydra.launcher`` with ``hydra/launcher=local``."""

    _target_: str = "hydra_plugins.vissl_zero_local.SideBySide"
    jobs: int | None = None
    """Most jobs at a time; null: as many as have cores (or GPUs, one per process) of their own."""


def register_launcher() -> None:
    """Register ``hydra/launcher=local`` in Hydra; a second call changes nothing."""
    ConfigStore.instance().store("local", LocalLauncherConfig, group="hydra/launcher", provider="vissl_zero")
    # Hydra finds no plugins in packages installed with ``pip install -e``. So this adds our folder to the namespace
    # package (which hydra-submitit-launcher installs), and our class to Hydra.
    namespace, folder = import_module("hydra_plugins"), str(Path(__file__).parent / "hydra_plugins")
    if folder not in namespace.__path__:
        namespace.__path__.append(folder)
    launcher = import_module("hydra_plugins.vissl_zero_local").SideBySide
    if launcher not in Plugins.instance().discover(Launcher):
        Plugins.instance().register(launcher)


@dataclass
class _Job:
    """A job of the sweep.

    Attributes:
        number, folder: number of the job, and its folder.
        overrides, command: its overrides, and the command that runs it.
        swept: overrides in which jobs differ.
        process, slot, started: process, slot, and start time on the monotonic clock, once started.
        code: exit code; None: not done.
    """

    number: int
    folder: Path
    overrides: list[str]
    command: list[str]
    swept: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    slot: int = 0
    started: float = 0.0
    code: int | None = None


@dataclass(frozen=True)
class Slots:
    """The slots of a machine; a job runs in each.

    Attributes:
        cores, gpus: ids of each slot's cores and GPUs; empty ``gpus``: jobs run on the CPU.
    """

    cores: list[list[int]] = field(default_factory=list)
    gpus: list[list[str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.cores)


class SideBySide(Launcher):
    """The launcher ``hydra/launcher=local``, which runs jobs in parallel on this machine."""

    def __init__(self, jobs: int | None = None) -> None:
        self._most = jobs
        self._config: DictConfig | None = None
        self._context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context and configuration; Hydra calls this."""
        self._config, self._context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; each result has the exit code, or the metric by which a sweeper searches.

        Raises:
            ConfigError, LaunchError: a key of the launcher is wrong, or a folder has a run with other overrides.
            KeyboardInterrupt, SystemExit: the sweep was asked to stop, and its jobs have saved and ended.
        """
        if self._most is not None and self._most < 1:
            raise ConfigError([Problem("hydra.launcher.jobs", str(self._most), "must be at least 1", "Leave it out.")])
        assert self._config is not None
        sweep_dir = Path(str(self._config.hydra.sweep.dir)).absolute()
        jobs = [self._job(sweep_dir, initial_job_idx + index, list(o)) for index, o in enumerate(job_overrides)]
        _require_own({job.folder: job.overrides for job in jobs})
        metric = self._objective(jobs[0])
        common = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if len(jobs) > 1 else set()
        waiting = []
        for job in jobs:
            job.swept = [word for word in job.overrides if word not in common]
            if claim(job.folder, job.overrides):
                waiting.append(job)
            else:
                job.code = 0
        slots = divide(this_host(), *self._needs(waiting or jobs[:1]), self._most, len(waiting))
        done = f", {len(jobs) - len(waiting)} of them done before" if len(waiting) < len(jobs) else ""
        print(f"{len(jobs)} jobs{done}, {len(slots)} at a time, in {sweep_dir}", flush=True)
        stopping.listen()
        self._run(waiting, slots, len(jobs))
        if (stop := stopping.requested_stop()) is not None:
            raise KeyboardInterrupt if stop.exit_code == stopping.INTERRUPTED else SystemExit(stop.exit_code)
        return [_answer(job, metric) for job in jobs]

    def _objective(self, job: _Job) -> str:
        assert self._context is not None and self._config is not None
        if self._config.hydra.runtime.choices.get("hydra/sweeper", "basic") == "basic":  # saves composing a job
            return ""
        tree = self._context.config_loader.load_sweep_config(self._config, job.overrides)
        return objective(self._config.hydra, tree.config)

    def _job(self, sweep_dir: Path, number: int, overrides: list[str]) -> _Job:
        assert self._config is not None
        folder = sweep_dir / str(number)
        words = [word for word in overrides if not word.lstrip("+~").startswith(("hydra.sweep", "hydra/launcher"))]
        hydra_overrides = OmegaConf.to_container(self._config.hydra.overrides.hydra, resolve=False)
        assert isinstance(hydra_overrides, list)
        outer = [str(word) for word in hydra_overrides if not str(word).startswith(_NOT_FOR_JOBS)]
        sources = self._config.hydra.runtime.config_sources
        folders = [str(source.path) for source in sources if source.provider == "command-line"]
        command = [sys.executable, "-m", "vissl_zero.cli", *words, *outer, f"hydra.run.dir={folder}"]
        command += [word for path in folders for word in ("--config-dir", path)]
        return _Job(number, folder, overrides, command)

    def _needs(self, jobs: Sequence[_Job]) -> tuple[int, bool]:
        """Return the number of processes of the largest job, and whether any job may run on GPUs."""
        assert self._context is not None and self._config is not None
        load = self._context.config_loader.load_sweep_config
        # Composition takes a fifth of a second, so jobs with equal recipe, processes and device share it.
        distinct = {tuple(word for word in job.overrides if _DECIDES.match(word)): job for job in jobs}
        trees = [load(self._config, job.overrides).config for job in distinct.values()]
        procs = max(int(tree.DISTRIBUTED.NUM_PROC_PER_NODE) for tree in trees)
        return max(1, procs), any(str(tree.MACHINE.DEVICE) != "cpu" for tree in trees)

    def _run(self, waiting: list[_Job], slots: Slots, total: int) -> None:
        free, queue = list(range(len(slots))), list(waiting)
        running: list[_Job] = []
        while queue or running:
            if stopping.requested_stop() is not None:
                _end([job.process for job in running if job.process is not None])
                return
            while queue and free:
                job = queue.pop(0)
                job.slot = free.pop(0)
                _start(job, slots)
                running.append(job)
            time.sleep(0.1)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                running.remove(job)
                free.append(job.slot)
                _finish(job, total)


_DECIDES = re.compile(r"[+~]*(config=|config/|config\.(DISTRIBUTED|MACHINE)\b)")
_NOT_FOR_JOBS = ("hydra.sweep", "hydra/launcher", "hydra.launcher", "hydra.mode", "hydra.run.dir", "hydra/sweeper")


def divide(host: Host, procs: int, uses_gpus: bool, most: int | None, num_jobs: int) -> Slots:
    """Divide the machine into slots, each with its own cores (and GPUs).

    Args:
        host: this machine.
        procs: number of processes of a job.
        uses_gpus: whether jobs may run on GPUs, one per process.
        most: requested number of slots; None: as many as get a core (or a GPU) per process.
        num_jobs: number of jobs, and so the most slots.
    """
    cores = sorted(os.sched_getaffinity(0))[: host.num_cores]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The names in the variable, which may be identifiers: GPUs that it leaves out must stay so for the jobs.
    names = visible.split(",") if visible else [str(index) for index in range(host.num_gpus)]
    gpus = names[: host.num_gpus] if uses_gpus and host.num_gpus >= procs else []
    count = max(1, min(most or (len(gpus) if gpus else len(cores)) // procs, num_jobs))
    if gpus and count > len(gpus) // procs:
        must = f"must be at most {len(gpus) // procs}: a job takes {procs} of {len(gpus)} GPUs"
        raise ConfigError([Problem("hydra.launcher.jobs", str(most), must, "Leave it out.")])
    return Slots(
        cores=[_share(cores, index, count) for index in range(count)],
        gpus=[gpus[index * procs : (index + 1) * procs] for index in range(count)] if gpus else [],
    )


def _share(cores: list[int], index: int, count: int) -> list[int]:
    """Return the cores of slot ``index``, which are contiguous; slots share cores if there are too few."""
    if count > len(cores):
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def _start(job: _Job, slots: Slots) -> None:
    environment = {**os.environ, SWEEP_VARIABLE: str(os.getpid())}
    if slots.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slots.gpus[job.slot])
    # ``taskset`` binds the process from its start, because torch counts the cores when it is imported.
    cores = slots.cores[job.slot]
    job.started = time.monotonic()
    with (job.folder / _OUTPUT).open("ab") as output:
        try:
            job.process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cores)), *job.command] if _HAS_TASKSET else job.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # so Ctrl-C reaches only this process, which forwards it once
            )
        except OSError as error:
            raise LaunchError(f"Job {job.number} cannot be started ({error.strerror}).") from error


_HAS_TASKSET = any((Path(folder) / "taskset").exists() for folder in os.get_exec_path())


def _finish(job: _Job, total: int) -> None:
    assert job.process is not None
    job.code = job.process.returncode
    JobNote(job.overrides, job.code).write(job.folder)
    how = "done" if job.code == 0 else f"failed with exit code {job.code}, see {job.folder / _OUTPUT}"
    values = " ".join(job.swept) or "the only job"
    print(f"[{job.number + 1}/{total}] {how} after {time.monotonic() - job.started:.0f} s: {values}", flush=True)


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Ask every running job to save and stop; kill the jobs that do not end in time."""
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _FAREWELL_S
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # With its ranks, which are in the same group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(job: _Job, metric: str) -> JobReturn:
    answer: Any = JobReturn(overrides=job.overrides, working_dir=str(job.folder), status=JobStatus.COMPLETED)
    answer.return_value = read_metric(job.folder, metric) if metric else job.code
    return answer
