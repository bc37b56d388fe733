"""The history of plans: forecast and measured memory of all plans that ran under a folder (``plan --history``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vissl_zero.engine.forecast_log import OUT_OF_MEMORY, RUNNING, Outcome, measured_peaks, outcomes
from vissl_zero.errors import VisslZeroError
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.resolve.saved import load_resolved

DONE, NOT_DONE = "done", "not done"


@dataclass(frozen=True)
class Past:
    """A plan that has run.

    Attributes:
        folder: folder of the run.
        plan: description of the plan, as tables print it.
        steps: optimizer steps under the plan, including steps that were repeated later.
        forecast_bytes: forecast peak of a rank (``StepMemory.resident_bytes``); None: unknown.
        measured_bytes: measured peak of rank 0: resident bytes beyond ``held_bytes`` (CPU), or bytes that torch had
            allocated (GPU); None: unknown.
        held_bytes: bytes of rank 0 that do not belong to the plan; None: unknown.
        outcome: "done", "out of memory" or "not done".
    """

    folder: Path
    plan: str
    steps: int
    forecast_bytes: int | None
    measured_bytes: int | None
    held_bytes: int | None
    outcome: str

    @property
    def error(self) -> float | None:
        """Relative error of the forecast: forecast / measured - 1; None: unknown."""
        if self.forecast_bytes is None or not self.measured_bytes:
            return None
        return self.forecast_bytes / self.measured_bytes - 1


def history(folder: Path) -> Iterator[Past]:
    """Yield all plans of all runs under ``folder``.

    If ``fit`` did not choose a plan, its forecast is made now. Cost: a second or two for each.
    """
    for path in sorted(folder.rglob("config.resolved.yaml")):
        if rows := outcomes(path.parent):
            yield from _fitted_past(path.parent, rows)
        else:
            yield _plain_past(path)


def _fitted_past(folder: Path, rows: Sequence[Outcome]) -> list[Past]:
    """List the plans that ``fit`` chose, in order; consecutive starts of the same plan share a row."""
    peaks = dict(measured_peaks(folder))
    past: list[Past] = []
    for index, row in enumerate(rows):
        if not past or (past[-1].plan, past[-1].forecast_bytes) != (row.plan, row.forecast_bytes):
            past.append(Past(folder, row.plan, 0, row.forecast_bytes, None, None, NOT_DONE))
        if row.outcome == RUNNING:
            past[-1] = _with_process(past[-1], row, rows[index + 1 :], peaks)
        elif row.outcome == OUT_OF_MEMORY:
            past[-1] = replace(past[-1], outcome=OUT_OF_MEMORY)
    if past[-1].outcome == NOT_DONE and (folder / "summary.json").exists():
        past[-1] = replace(past[-1], outcome=DONE)
    return past


def _with_process(past: Past, begun: Outcome, later: Sequence[Outcome], peaks: Mapping[int, int]) -> Past:
    """Add the outcome of one process of rank 0. If it ran out of memory, its last steps are only in the log."""
    first, held = begun.step or 0, begun.held_bytes or 0
    if later and later[0].outcome == OUT_OF_MEMORY:
        last, most = later[0].step or first, later[0].peak_bytes
    else:
        end = next((row.step for row in later if row.outcome == RUNNING and row.step is not None), sys.maxsize)
        # Only steps of this process: the file holds those of earlier plans too.
        step_peaks = {step: peak for step, peak in peaks.items() if first < step <= end}
        last, most = max(step_peaks, default=first), max(step_peaks.values(), default=None)
    known = [size for size in (past.measured_bytes, None if most is None else most - held) if size is not None]
    return replace(past, steps=past.steps + last - first, measured_bytes=max(known, default=None), held_bytes=held)


def _plain_past(path: Path) -> Past:
    plan, forecast = _forecast(path)
    peaks = dict(measured_peaks(path.parent))
    with suppress(OSError, ValueError, KeyError, TypeError):
        held = int(json.loads((path.parent / "summary.json").read_text())["memory_before_bytes"])
        return Past(path.parent, plan, len(peaks), forecast, max(peaks.values()) - held, held, DONE)
    return Past(path.parent, plan, len(peaks), forecast, None, None, NOT_DONE)


def _forecast(path: Path) -> tuple[str, int | None]:
    try:
        forecast = dry_run(load_resolved(path)).forecast
    except VisslZeroError:
        return "?", None
    return f"level {forecast.wrap_plan.level}", None if forecast.step is None else forecast.step.resident_bytes
