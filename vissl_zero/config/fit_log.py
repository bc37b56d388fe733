"""What ``ZERO.LEVEL: fit`` expects of a run, and what came of it: ``forecasts.jsonl`` in the run folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vissl_zero.config.resolved import ResolvedRun

FILE_NAME = "forecasts.jsonl"
STARTED, OUT_OF_MEMORY = "started", "out of memory"
SHARE_LEFT = 0.9  # of a forecast that ran out of memory: what a later plan may be forecast to take


@dataclass(frozen=True)
class FitChoice:
    """A plan that ``fit`` may run.

    Attributes:
        run: resolved.
        plan: for people.
        forecast_bytes: most a rank would hold where it computes: on the CPU resident, on a GPU allocated.
        budget_bytes: what it was to fit into.
    """

    run: ResolvedRun
    plan: str
    forecast_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class Outcome:
    """A line of the log: a plan, and ``STARTED`` or ``OUT_OF_MEMORY``."""

    plan: str
    forecast_bytes: int
    budget_bytes: int
    outcome: str


def note(folder: Path, choice: FitChoice, outcome: str) -> None:
    """Append a line. A disk that takes nothing more ends no run."""
    row = Outcome(choice.plan, choice.forecast_bytes, choice.budget_bytes, outcome)
    with suppress(OSError), (folder / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def outcomes(folder: Path) -> list[Outcome]:
    """The lines of a run folder in order; damaged ones are passed over."""
    found = []
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / FILE_NAME).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                found.append(Outcome(**json.loads(line)))
    return found


def most_bytes(rows: Sequence[Outcome]) -> int | None:
    """What a plan may be forecast to take where those of ``rows`` were tried; None: none ran out of memory."""
    failed = [row.forecast_bytes for row in rows if row.outcome == OUT_OF_MEMORY]
    return int(SHARE_LEFT * min(failed)) if failed else None
