"""The list of runs in a folder, read from their files: state, progress, results, and the command to resume."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vissl_zero.atomic import as_object, open_regular, read_object, read_regular
from vissl_zero.engine.stopping import read_note, read_summary
from vissl_zero.launch.run_folder import owner_of
from vissl_zero.resolve.saved import read_saved

STATES = ("running", "waiting", "stopped", "failed", "done")
FIGURES = ("loss_last", "top1", "knn_top1_after", "images_per_s")
COMMAND_MARK = "# command: "
_TAIL_BYTES = 65536
_MOST_BYTES = 2**24
_OF_A_RUN = {"run.lock", "metrics.jsonl", "slurm.json"}
_SAVED = {0, 75, 130}


@dataclass(frozen=True)
class ListedRun:
    """A run in a folder, as its files describe it.

    Attributes:
        folder: the run folder.
        state: one of ``STATES``.
        why: process of a running run, or why the run failed or stopped; may be empty.
        recipe: value of ``config=``.
        step: number of completed optimizer steps.
        figures: results by name; only the last loss and the speed until the run has ended.
        age_s: seconds since the run last wrote a file.
        resume: command that continues the run; empty if the run is running or done.
    """

    folder: str
    state: str
    why: str
    recipe: str
    step: int
    figures: Mapping[str, float]
    age_s: float
    resume: str


def find_runs(root: Path) -> Iterator[Path]:
    """Yield every run folder at or below ``root``, sorted by name. Folders that cannot be read are left out."""
    for place, folders, files in os.walk(root):
        # Folders of loggers and of weights have copies of the configuration, but they are not runs.
        if "config.resolved.yaml" in files and _OF_A_RUN & {*files}:
            folders.clear()
            yield Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def listed(folder: Path) -> ListedRun:
    """Return the run in a folder. Cost: a millisecond; only the end of the metrics is read."""
    summary, last = read_summary(folder), _last_record(folder)
    state, why = _state(folder, summary, last)
    figures = {name: value for name in FIGURES if isinstance(value := summary.get(name), int | float)}
    if not summary and last:
        newest_figures = {"loss_last": last.get("loss"), "images_per_s": last.get("images_per_s")}
        figures = {name: value for name, value in newest_figures.items() if value is not None}
    newest = max((path.stat().st_mtime for path in folder.iterdir() if path.is_file()), default=0.0)
    return ListedRun(
        folder=str(folder),
        state=state,
        why=why,
        recipe=str(summary.get("recipe") or _recipe(folder)),
        step=int(last.get("step", 0) or summary.get("num_steps", 0)),
        figures=figures,
        age_s=max(0.0, time.time() - newest),
        resume="" if state in ("running", "done") else _resume(folder),
    )


def _last_record(folder: Path) -> dict[str, Any]:
    """Return the last complete record of a run's metrics; empty if there is none."""
    try:
        with os.fdopen(open_regular(folder / "metrics.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    # The last line may be torn, by a kill or by a write in progress; the one before it is whole.
    for line in reversed(lines[-2:]):
        try:
            return as_object(line)
        except ValueError:
            continue
    return {}


def _state(folder: Path, summary: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[str, str]:
    owner, is_alive = owner_of(folder)
    if is_alive:
        return "running", f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    if summary and summary.get("num_steps") == last.get("step", summary.get("num_steps")):
        return "done", ""
    try:
        facts = read_object(folder / "diverged.json")
        return "failed", f"loss {facts.get('loss')} at step {facts.get('step')}"
    except (OSError, ValueError):
        pass
    note = read_note(folder)
    if note is not None and note.code not in (None, *_SAVED):
        return "failed", f"exit code {note.code}"
    if owner:
        return "failed", "its process ended without saving (killed, or the machine went down)"
    if (folder / "slurm.json").exists() and not last:
        return "waiting", "submitted to SLURM"
    if any(folder.glob("checkpoints/step_*")):
        return "stopped", "has a checkpoint"
    return "failed", "ended before its first checkpoint"


def _recipe(folder: Path) -> str:
    try:
        return str(read_saved(folder / "config.resolved.yaml").get("recipe", "?"))
    except (OSError, ValueError):
        return "?"


def _resume(folder: Path) -> str:
    try:
        text = read_regular(folder / "config.user.yaml", _MOST_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    commands = [line.removeprefix(COMMAND_MARK) for line in text.splitlines() if line.startswith(COMMAND_MARK)]
    words = shlex.split(commands[0]) if commands else ["vissl-zero", f"config={_recipe(folder)}"]
    words = [word for word in words if not word.startswith("config.CHECKPOINT.DIR=")]
    return shlex.join([*words, f"config.CHECKPOINT.DIR={folder}"])


def as_json(run: ListedRun) -> dict[str, Any]:
    """Return the run as ``vissl-zero runs --json`` prints it."""
    return {**vars(run), "figures": dict(run.figures)}
