"""``ZERO.LEVEL: fit`` without torch: the possible plans, the chosen one, and the outcome of each."""

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

_SHARE_LEFT = 0.9  # of a forecast that ran out of memory: what a later plan may be forecast to take


@dataclass(frozen=True)
class FitOption:
    """A plan that trains the same and that host memory and disk have room for.

    Attributes:
        plan: description for people.
        forecast_bytes: most a rank would hold where it computes: on the CPU resident, on a GPU allocated.
        settings: key path under ``config`` -> value.
    """

    plan: str
    forecast_bytes: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class FitChoice:
    """A plan that ``fit`` runs.

    Attributes:
        run: resolved.
        plan, forecast_bytes: as of ``FitOption``.
        budget_bytes: what it was to fit into.
    """

    run: ResolvedRun
    plan: str
    forecast_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class FitPlans:
    """All plans, cheapest first, of which one is running.

    Attributes:
        options: those of ``planner/planning.py``; the first of them that fits is taken.
        budget_bytes: bytes that it fits into.
        given_bytes: where the user has said what a rank may use; None: what is free counts.
        why: the sentence on the first choice.
    """

    options: Sequence[FitOption]
    budget_bytes: int
    given_bytes: int | None
    why: str

    def first(self) -> FitOption:
        """Return the cheapest option that fits."""
        return next(option for option in self.options if option.forecast_bytes <= self.budget_bytes)

    def next(self, rows: Sequence[Outcome], free_bytes: int) -> FitOption | None:
        """Choose the cheapest that fits what is free now, and 90 % of the smallest forecast that ran out of memory.

        What plans have taken beyond their forecast is set aside. Where none fits: the smallest, if it is smaller than
        those that failed, else None.

        Args:
            rows: rows of the log; one at least ran out of memory.
            free_bytes: what a rank may use now, by measurement.
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
        resolved: an option and a sentence on it -> the run.
    """

    def __init__(self, plans: FitPlans, resolved: Callable[[FitOption, str], ResolvedRun]):
        self._plans = plans
        self._resolved = resolved
        self._rows: list[Outcome] = []  # also where the disk takes no log
        self.choice = self._choice(plans.first(), plans.why, plans.budget_bytes)

    def _choice(self, option: FitOption, why: str, budget_bytes: int) -> FitChoice:
        return FitChoice(self._resolved(option, why), option.plan, option.forecast_bytes, budget_bytes)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.choice.run.run_dir)

    def started(self) -> None:
        """Note that the choice was started."""
        self._note(self._outcome(STARTED))

    def ran_out(self) -> None:
        """Note that it ran out of memory, and what is known of what it took."""
        row = self._outcome(OUT_OF_MEMORY)
        rows = outcomes(self.folder)
        if rows and rows[-1].outcome == RUNNING:
            peaks = dict(measured_peaks(self.folder, rows[-1].step or 0))
            step = max(peaks, default=rows[-1].step)
            row = replace(row, step=step, held_bytes=rows[-1].held_bytes, peak_bytes=max(peaks.values(), default=None))
        self._note(row)

    def go_on(self, free_bytes: int) -> str:
        """Choose the next plan; returns the sentence that says which and why, empty where there is none.

        Args:
            free_bytes: what a rank may use now, by measurement.
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
    """Replace a configuration whose ZERO.LEVEL is fit by one to resolve, as if the user had written the option."""
    return replace(
        composed,
        run=with_settings(composed.run, option.settings),
        written=_without_chosen(composed.written),
        notes=(*composed.notes, why),
    )


def with_settings(cfg: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Write the configuration that gets a plan, as a user would."""
    cfg = copy.deepcopy(cfg)
    cfg.ZERO.MEMORY_GB = cfg.ZERO.HOST_MEMORY_GB = cfg.ZERO.DISK_GB = None
    cfg.ZERO.MACHINE_PROFILE = None
    for path, value in settings.items():
        *blocks, key = path.split(".")
        setattr(functools.reduce(getattr, blocks, cfg), key, value)
    return cfg


def _without_chosen(written: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the chosen values from the tree as written: saved files show no interpolations in their place."""
    left = copy.deepcopy(dict(written))
    left.pop("ZERO", None)
    left.get("DATA", {}).get("TRAIN", {}).pop("BATCHSIZE_PER_REPLICA", None)
    left.get("MODEL", {}).pop("ACTIVATION_CHECKPOINTING", None)
    return left


def most_bytes(rows: Sequence[Outcome]) -> int | None:
    """Return what a plan may be forecast to take where those of ``rows`` were tried; None: none ran out of memory."""
    failed = _failed(rows)
    return int(_SHARE_LEFT * min(failed)) if failed else None


def shortfall(rows: Sequence[Outcome]) -> int:
    """Return the most bytes beyond its forecast that any plan took that ran out of memory."""
    taken = ((row.measured_bytes, row.forecast_bytes) for row in rows if row.outcome == OUT_OF_MEMORY)
    return max([0, *(measured - forecast for measured, forecast in taken if measured is not None)])


def _failed(rows: Sequence[Outcome]) -> list[int]:
    return [row.forecast_bytes for row in rows if row.outcome == OUT_OF_MEMORY]


def gib(num_bytes: int) -> str:
    """Format bytes in GiB, to three digits."""
    return f"{num_bytes / 2**30:.3g}"
