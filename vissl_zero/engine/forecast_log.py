"""``forecasts.jsonl``: the plans that ``fit`` has started in a run folder, and their outcomes. Imports no torch.

A line is written when a plan is started, when rank 0 has done its first step, and when memory has run out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FILE_NAME = "forecasts.jsonl"
STARTED, RUNNING, OUT_OF_MEMORY = "started", "running", "out of memory"


@dataclass(frozen=True)
class Outcome:
    """A line of the log.

    Attributes:
        plan, forecast_bytes, budget_bytes: as of ``FitChoice``.
        outcome: ``STARTED`` (written by the launcher), ``RUNNING`` (by rank 0) or ``OUT_OF_MEMORY``.
        step: RUNNING: optimizer steps done when the process started; OUT_OF_MEMORY: the last known step.
        held_bytes: RUNNING: memory of rank 0 that the forecast leaves out: before the model was built, and code
            mapped since.
        peak_bytes: OUT_OF_MEMORY: known peak memory of rank 0, including ``held_bytes``.
    """

    plan: str
    forecast_bytes: int
    budget_bytes: int
    outcome: str
    step: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def measured_bytes(self) -> int | None:
        """Return the measured counterpart of the forecast, bytes; None: not known."""
        return None if self.peak_bytes is None or self.held_bytes is None else self.peak_bytes - self.held_bytes


def note(folder: Path, row: Outcome) -> None:
    """Append a line; does nothing if the disk is full."""
    entry = {name: value for name, value in asdict(row).items() if value is not None}
    with suppress(OSError), (folder / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def note_running(folder: Path, step: int, held_bytes: int) -> None:
    """Append that rank 0 of the newest plan has done its first step; arguments as in ``Outcome``."""
    if rows := outcomes(folder):
        note(folder, replace(rows[-1], outcome=RUNNING, step=step, held_bytes=held_bytes, peak_bytes=None))


def outcomes(folder: Path) -> list[Outcome]:
    """Return the lines of a run folder in order, without damaged lines."""
    outcomes = []
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / FILE_NAME).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                outcomes.append(Outcome(**json.loads(line)))
    return outcomes


def measured_peaks(folder: Path, after: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (step, peak bytes of rank 0 so far) for each step after ``after`` in ``metrics.jsonl``."""
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                if entry["step"] > after:
                    yield int(entry["step"]), int(entry["bytes"]["peak"])
