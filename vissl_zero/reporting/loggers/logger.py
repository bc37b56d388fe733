"""The interface of a logger: what one must do so that a killed run continues in it with every step once."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_regular, replacing

_ID_FILE = "run_id"
_MAX_BYTES = 100


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it.

    Attributes:
        folder: the run folder.
        run_id: 16 hexadecimal digits, the same after every resume, on any machine.
        recipe: what ``config=`` named.
        config: the resolved configuration, as plain containers.
        step: optimizer steps done: 0, or those of the checkpoint that the run resumes from.
    """

    folder: Path
    run_id: str
    recipe: str
    config: Mapping[str, Any]
    step: int


class Logger:
    """Base of all loggers; built without arguments, used on rank 0 alone.

    ``open`` comes first, then ``log`` with increasing steps, ``attach`` once if the run came to its end, and ``close``.
    An error that a method raises ends this logger with a warning; training continues.
    """

    def open(self, run: LoggedRun) -> int:
        """Open the place of ``run``, or continue there; return the last step that it holds, 0 if it holds none.

        Cut or hide steps after ``run.step`` where that can be done: they are trained again. Where it cannot be done,
        return the last step as it is: a resume is exact, so the figures of those steps stay, and they are not logged
        again. Steps between the returned one and ``run.step`` (lost when the run was killed) are logged once more.
        """
        raise NotImplementedError

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log all finite figures of ``step``, by tag (``train/loss``); called once per step, in order."""
        raise NotImplementedError

    def log_histograms(self, counts: Mapping[str, Mapping[int, int]], step: int) -> None:
        """Log histograms after the figures of ``step``: tag -> bucket -> elements (``Histograms.EDGES``), if it can."""

    def attach(self, files: Sequence[Path]) -> None:
        """Keep files with the run: configuration, summary, report. The run folder has them anyway."""

    def close(self, is_over: bool) -> None:
        """Write what waits, and end. ``is_over``: the run came to its end; it was not stopped and did not fail."""


def run_id(folder: Path) -> str:
    """Return the stable id of the run in ``folder``; the first call draws it and saves it to the file ``run_id``.

    Raises:
        OSError: the folder cannot be read or written.
    """
    path = folder / _ID_FILE
    try:
        stored = read_regular(path, _MAX_BYTES).decode().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        stored = ""
    if len(stored) == 16 and set(stored) <= set("0123456789abcdef"):
        return stored
    # Random, not a hash of the path: a folder may be moved, or used again for another run.
    drawn = uuid.uuid4().hex[:16]
    with replacing(path) as temporary:
        temporary.write_text(f"{drawn}\n", encoding="utf-8")
    return drawn
