"""``ZERO.LEVEL: fit`` without torch: the possible plans, the chosen plan, and the outcomes of plans that ran."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.config.run_config import RunConfig
from vissl_zero.engine.forecast_log import OUT_OF_MEMORY, RUNNING, STARTED, Outcome, measured_peaks, note, outcomes
from vissl_zero.resolve.resolved import ResolvedRun

if TYPE_CHECKING:
    from vissl_zero.config.compose import Composed

_SHARE_LEFT = 0.9  # largest forecast of a later plan, as a share of the forecast that ran out of memory


@dataclass(frozen=True)
class FitOption:
    """A plan that trains the same model and fits into host memory and disk.

    Attributes:
        plan: description of the plan, as messages print it.
        forecast_bytes: forecast peak of a rank's device: resident bytes on the CPU, allocated bytes on a GPU.
        settings: key path under ``config`` -> value.
    """

    plan: str
    forecast_bytes: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class FitChoice:
    """The plan that ``fit`` runs.

    Attributes:
        run: the resolved run with this plan.
        plan, forecast_bytes: see ``FitOption``.
        budget_bytes: budget for which the plan was chosen.
    """

    run: ResolvedRun
    plan: str
    forecast_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class FitPlans:
    """All plans of a run that ``fit`` may choose.

    Attributes:
        options: plans of ``planner/planning.py``, cheapest first; the first that fits is chosen.
        budget_bytes: budget of a rank for the first choice.
        given_bytes: limit of a rank that the user has set; None: only free memory limits it.
        why: sentence that explains the first choice.
    """

    options: Sequence[FitOption]
    budget_bytes: int
    given_bytes: int | None
    why: str

    def first(self) -> FitOption:
        """Return the cheapest option that fits."""
        return next(option for option in self.options if option.forecast_bytes <= self.budget_bytes)

    def next(self, rows: Sequence[Outcome], free_bytes: int) -> FitOption | None:
        """Choose the cheapest plan that fits free memory and 90 % of the smallest forecast that ran out of memory.

        Bytes that plans took beyond their forecasts are subtracted from free memory. If no plan fits, this returns the
        smallest plan, provided that it is smaller than those that failed, else None.

        Args:
            rows: rows of the log; at least one plan ran out of memory.
            free_bytes: measured bytes that a rank may use now.
        """
        most, free = most_bytes(rows), self.allowed(free_bytes) - shortfall(rows)
        for option in self.options:
            if option.forecast_bytes <= min(most or 0, free):
                return option
        least = min(self.options, key=lambda option: option.forecast_bytes)
        return least if least.forecast_bytes < min(_failed(rows), default=0) else None

    def allowed(self, free_bytes: int) -> int:
        """Return the smaller of a rank's free memory and the user's limit."""
        return free_bytes if self.given_bytes is None else min(free_bytes, self.given_bytes)


class FitRun:
    """The plan that ``fit`` chose for a run, and how the run continues when memory runs out.

    Args:
        plans: plans of the run.
        resolved: function that resolves the run from an option and a sentence that explains it.
    """

    def __init__(self, plans: FitPlans, resolved: Callable[[FitOption, str], ResolvedRun]):
        self._plans = plans
        self._resolved = resolved
        self._rows: list[Outcome] = []  # kept in memory too, because the log may not be writable
        self.choice = self._choice(plans.first(), plans.why, plans.budget_bytes)

    def _choice(self, option: FitOption, why: str, budget_bytes: int) -> FitChoice:
        return FitChoice(self._resolved(option, why), option.plan, option.forecast_bytes, budget_bytes)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.choice.run.run_dir)

    def started(self) -> None:
        """Log that the chosen plan was started."""
        self._note(self._outcome(STARTED))

    def ran_out(self) -> None:
        """Log that the chosen plan ran out of memory, and the bytes that it is known to have taken."""
        row = self._outcome(OUT_OF_MEMORY)
        rows = outcomes(self.folder)
        if rows and rows[-1].outcome == RUNNING:
            peaks = dict(measured_peaks(self.folder, rows[-1].step or 0))
            step = max(peaks, default=rows[-1].step)
            row = replace(row, step=step, held_bytes=rows[-1].held_bytes, peak_bytes=max(peaks.values(), default=None))
        self._note(row)

    def go_on(self, free_bytes: int) -> str:
        """Choose the next plan and return a sentence that explains the choice, or "" if no plan is left.

        Args:
            free_bytes: measured bytes that a rank may use now.
        """
        option = self._plans.next(self._rows, free_bytes)
        if option is None:
            return ""
        allowed, failed = self._plans.allowed(free_bytes), self._rows[-1]
        measured = failed.measured_bytes
        took = f", took at least {gib(measured)}" if measured is not None and measured > failed.forecast_bytes else ""
        text = (
            f"{option.plan}, forecast to take {gib(option.forecast_bytes)} GiB a rank: {gib(allowed)} GiB may be used "
            f"now, and {failed.plan}, forecast to take {gib(failed.forecast_bytes)}{took}, ran out of memory"
        )
        self.choice = self._choice(option, f"config.ZERO.LEVEL=fit went on with {text}.", allowed)
        return f"Going on with {text}"

    def _outcome(self, outcome: str) -> Outcome:
        return Outcome(self.choice.plan, self.choice.forecast_bytes, self.choice.budget_bytes, outcome)

    def _note(self, row: Outcome) -> None:
        self._rows.append(row)
        note(self.folder, row)


def with_option(composed: Composed, option: FitOption, why: str) -> Composed:
    """Return the configuration with ``option`` in the place of fit, as if the user had written it."""
    return replace(
        composed,
        run=with_settings(composed.run, option.settings),
        written=_without_chosen(composed.written),
        notes=(*composed.notes, why),
    )


def with_settings(cfg: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a copy of the configuration with ``settings``, as if the user had written them."""
    cfg = copy.deepcopy(cfg)
    cfg.ZERO.MEMORY_GB = cfg.ZERO.HOST_MEMORY_GB = cfg.ZERO.DISK_GB = None
    cfg.ZERO.MACHINE_PROFILE = None
    for path, value in settings.items():
        *blocks, key = path.split(".")
        setattr(functools.reduce(getattr, blocks, cfg), key, value)
    return cfg


def _without_chosen(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree as written without the chosen keys, so that saved files show their chosen values."""
    left = copy.deepcopy(dict(written))
    left.pop("ZERO", None)
    left.get("DATA", {}).get("TRAIN", {}).pop("BATCHSIZE_PER_REPLICA", None)
    left.get("MODEL", {}).pop("ACTIVATION_CHECKPOINTING", None)
    return left


def most_bytes(rows: Sequence[Outcome]) -> int | None:
    """Return the largest forecast that a plan may have after the plans of ``rows``; None: none ran out of memory."""
    failed = _failed(rows)
    return int(_SHARE_LEFT * min(failed)) if failed else None


def shortfall(rows: Sequence[Outcome]) -> int:
    """Return the most bytes by which a plan that ran out of memory exceeded its forecast."""
    taken = ((row.measured_bytes, row.forecast_bytes) for row in rows if row.outcome == OUT_OF_MEMORY)
    return max([0, *(measured - forecast for measured, forecast in taken if measured is not None)])


def _failed(rows: Sequence[Outcome]) -> list[int]:
    return [row.forecast_bytes for row in rows if row.outcome == OUT_OF_MEMORY]


def gib(num_bytes: int) -> str:
    """Format bytes in GiB, to three digits."""
    return f"{num_bytes / 2**30:.3g}"
