"""A job of a sweep and its folder: done before, to be done, or somebody else's. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from vissl_zero.engine import stopping
from vissl_zero.errors import LaunchError, VisslZeroError
from vissl_zero.launch.slurm_task import requeue
from vissl_zero.reporting.sweep_note import JobNote, is_done, read_note

# What an attempt that left no checkpoint leaves, and what the next one would stumble over.
_LEFTOVERS = ("metrics.jsonl", "summary.json", "tensorboard", "logs")


def claim(folder: Path, overrides: Sequence[str]) -> bool:
    """Take a folder for a job; whether there is anything left to do.

    An attempt that was interrupted is continued from its checkpoint, or made anew if it has none.

    Raises:
        LaunchError: the folder holds a run of something else.
    """
    note = read_note(folder)
    is_foreign = note.overrides != list(overrides) if note else (folder / "metrics.jsonl").exists()
    if is_foreign:
        raise LaunchError(
            f"hydra.sweep.dir: {folder} holds another job than this one ({' '.join(overrides)}). Name another folder, "
            "or give the very command that began there to do what is missing."
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
                "config.CHECKPOINT.DIR: every job of a sweep has a folder of its own. Leave it out, and name the "
                "folder of all of them with hydra.sweep.dir=<folder>."
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
