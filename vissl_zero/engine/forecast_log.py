"""Which plans ``fit`` has started in a run folder and what became of them: ``forecasts.jsonl``. Imports no torch.

A line is written where a plan is started, where rank 0 has done its first step, and where memory ran out.
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
        outcome: ``STARTED`` by the launcher, ``RUNNING`` in a process of rank 0, or ``OUT_OF_MEMORY``.
        step: RUNNING: optimizer steps done when that process began; OUT_OF_MEMORY: the last one that is known of it.
        held_bytes: RUNNING: what rank 0 holds beside the plan: before the model was built, and code mapped since.
        peak_bytes: OUT_OF_MEMORY: most that rank 0 has held, ``held_bytes`` included, as far as it is known.
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
        """What the forecast is about, measured; None: not known."""
        return None if self.peak_bytes is None or self.held_bytes is None else self.peak_bytes - self.held_bytes


def note(folder: Path, row: Outcome) -> None:
    """Append a line. A disk that takes nothing more ends no run."""
    entry = {name: value for name, value in asdict(row).items() if value is not None}
    with suppress(OSError), (folder / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def note_running(folder: Path, step: int, held_bytes: int) -> None:
    """Record that rank 0 of the plan started last has done its first step; see ``Outcome``."""
    if rows := outcomes(folder):
        note(folder, replace(rows[-1], outcome=RUNNING, step=step, held_bytes=held_bytes, peak_bytes=None))


def outcomes(folder: Path) -> list[Outcome]:
    """Read the lines of a run folder in order; damaged ones are passed over."""
    outcomes = []
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / FILE_NAME).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                outcomes.append(Outcome(**json.loads(line)))
    return outcomes


def measured_peaks(folder: Path, after: int = 0) -> Iterator[tuple[int, int]]:
    """Yield steps beyond ``after`` in ``metrics.jsonl``, and the peak of rank 0 until then, bytes."""
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                if entry["step"] > after:
                    yield int(entry["step"]), int(entry["bytes"]["peak"])
