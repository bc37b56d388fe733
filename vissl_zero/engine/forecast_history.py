"""Forecast against measured memory of all runs under a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vissl_zero.config.fit_log import OUT_OF_MEMORY, STARTED, outcomes
from vissl_zero.config.saved import load_resolved
from vissl_zero.engine.dry_run import dry_run
from vissl_zero.errors import VisslZeroError


@dataclass(frozen=True)
class Past:
    """A plan that was run.

    Attributes:
        folder: of the run.
        plan: for people.
        forecast_bytes: peak of a rank; None: not known.
        measured_bytes: of rank 0: what the process grew by over what it held before the model was built (CPU), or what
            torch had allocated at most (GPU); None: the run has not come to its end, or ran out of memory.
        outcome: "done", "out of memory" or "not done".
    """

    folder: Path
    plan: str
    forecast_bytes: int | None
    measured_bytes: int | None
    outcome: str

    @property
    def error(self) -> float | None:
        """Forecast over measured, less 1."""
        if self.forecast_bytes is None or not self.measured_bytes:
            return None
        return self.forecast_bytes / self.measured_bytes - 1


def history(folder: Path) -> Iterator[Past]:
    """All runs under ``folder``. Where ``fit`` did not choose, the forecast is made now, in a second or two."""
    for path in sorted(folder.rglob("config.resolved.yaml")):
        rows, place = outcomes(path.parent), path.parent
        for row in rows:
            if row.outcome == OUT_OF_MEMORY:
                yield Past(place, row.plan, row.forecast_bytes, None, OUT_OF_MEMORY)
        measured = _measured(place)
        chosen = next((row for row in reversed(rows) if row.outcome == STARTED), None)
        if chosen is None:
            plan, forecast = _forecast(path)
        else:
            plan, forecast = chosen.plan, chosen.forecast_bytes
        if not rows or rows[-1].outcome != OUT_OF_MEMORY:
            yield Past(place, plan, forecast, measured, "not done" if measured is None else "done")


def _measured(folder: Path) -> int | None:
    """Of the run's rank 0."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = int(json.loads((folder / "summary.json").read_text())["memory_before_bytes"])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max(int(json.loads(line)["bytes"]["peak"]) for line in lines) - before
    return None


def _forecast(path: Path) -> tuple[str, int | None]:
    try:
        forecast = dry_run(load_resolved(path)).forecast
    except VisslZeroError:
        return "?", None
    return f"level {forecast.wrap_plan.level}", None if forecast.step is None else forecast.step.peak_bytes
