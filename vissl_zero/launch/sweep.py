"""A sweep, whatever launches its jobs: a safe folder, one summary, and each job's folder. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.derive.placement_plan import is_unsafe
from vissl_zero.config.saved import leaves
from vissl_zero.engine import stopping
from vissl_zero.errors import ConfigError, LaunchError, Problem, VisslZeroError
from vissl_zero.launch.slurm_task import private_folder, requeue
from vissl_zero.reporting.sweep_note import JobNote, is_done, read_note

# What an attempt that left no checkpoint leaves, and what the next one would stumble over.
_LEFTOVERS = ("metrics.jsonl", "summary.json", "tensorboard", "logs")


def claim(folder: Path, overrides: Sequence[str]) -> bool:
    """Take a folder for a job. Returns whether anything is left to do.

    An interrupted attempt resumes from its checkpoint, or starts from scratch if it has none.

    Raises:
        LaunchError: the folder holds a run of something else.
    """
    note = read_note(folder)
    is_foreign = note.overrides != list(overrides) if note else (folder / "metrics.jsonl").exists()
    if is_foreign:
        raise LaunchError(
            f"hydra.sweep.dir: {folder} holds a different job ({' '.join(overrides)}). Name another folder, "
            "or repeat the command that was started there to run the missing jobs."
        )
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
    """Run a job in this process unless it was done before. No error ends a sweep.

    Args:
        folder: of the job.
        overrides: as Hydra gives them.
        run: does the job; its exit code.
        max_requeues: of a SLURM job that saved and stopped.
    Returns:
        Its exit code, which its note keeps; where the sweep was asked to stop while a job came to its end, that of
        stopping.
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
    except Exception:  # noqa: BLE001 - a defect in one job; the others are run all the same
        traceback.print_exc()
        code = 1
    executor = os.environ.get("SUBMITIT_EXECUTOR")
    if code == stopping.STOPPED and executor == "slurm":
        code = requeue(max_requeues)
    JobNote(list(overrides), code).write(folder)
    asked = stopping.asked()
    return asked.exit_code if code == 0 and asked is not None and executor is None else code


_sweep_dir: Path | None = None


class SweepFolder(Callback):
    """Called by Hydra, in the process that the user started."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember where the sweep goes; close the folder that submitit unpickles from.

        Raises:
            SystemExit: that folder is open to others, or a text for sbatch has several lines. (Hydra continues after
                any other exception of a callback.)
        """
        global _sweep_dir
        _sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        folder = OmegaConf.select(config, "hydra.launcher.submitit_folder")
        if folder is None:
            return
        try:
            _check(OmegaConf.to_container(config.hydra.launcher, resolve=True))
            logs = private_folder(Path(str(folder).split("%")[0]).absolute())
        except VisslZeroError as error:
            print(error, file=sys.stderr)
            _sweep_dir = None
            raise SystemExit(2) from error
        print(f"sweep folder  {_sweep_dir}\nlogs          {logs}", flush=True)


def _remove_if_unused(folder: Path) -> None:
    """Take back what Hydra leaves of a sweep whose jobs were looked at only, or refused."""
    if {path.name for path in folder.iterdir()} == {"multirun.yaml"}:
        (folder / "multirun.yaml").unlink()
        folder.rmdir()


def _check(launcher: Any) -> None:
    """Refuse texts that would end a line of the sbatch script; ``setup`` is shell."""
    texts = [(key, value) for key, value in leaves(launcher) if not key.startswith("setup")]
    if found := [_two_lines(key, value) for key, value in texts if is_unsafe(value)]:
        raise ConfigError(found)


def _two_lines(key: str, value: str) -> Problem:
    must = "must be one line of printable text: the next line would be read as an option or a command"
    return Problem(f"hydra.launcher.{key}", repr(value), must, "Remove the line breaks.")


def finish_sweep() -> int | None:
    """Write and print the summary of the sweep that this process ran; its worst exit code, or None without a sweep."""
    global _sweep_dir
    folder, _sweep_dir = _sweep_dir, None
    if folder is None or not folder.is_dir():
        return None
    notes = [(path, note) for path in folder.iterdir() if path.is_dir() and (note := read_note(path)) is not None]
    if not notes:
        _remove_if_unused(folder)
        return None
    from vissl_zero.reporting.sweep_summary import CSV_NAME, PLOT_NAME, collect, print_sweep, write_sweep

    rows = collect(folder)
    write_sweep(folder, rows)
    print()
    print_sweep(rows)
    print(f"\nsweep folder  {folder}  ({CSV_NAME}, {PLOT_NAME})")
    missing = sum(not is_done(path) for path, _ in notes)
    again = f"The same command with hydra.sweep.dir={folder} does those."
    if stopping.asked() is not None:
        print(f"Stopped: some jobs are unfinished or were not started. {again}")
    elif missing:
        print(f"{missing} of {len(notes)} jobs are not done. {again}")
    return max((note.code or 0 for _, note in notes), default=0)
