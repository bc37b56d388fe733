"""Ending a run whose figure no longer gets better (``HOOKS.EARLY_STOPPING``)."""

from __future__ import annotations

import math
from typing import Any

import rich
import torch
from rich.console import Console

from vissl_zero.collectives import all_reduce_max
from vissl_zero.config.blocks.output import EarlyStopping
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.early_stopping import KEY, periods
from vissl_zero.terminal import say


class EarlyStoppingHook(Hook):
    """Ends the run as its last step would, after PATIENCE measurements in a row without a better one.

    Comes after the hooks that measure, before those that save. Adds ``early_stopping`` to the results. Cost: an
    all-reduce of a number at each measurement, so that every rank decides by the same figure.

    Args:
        options: the block ``HOOKS.EARLY_STOPPING``, with a METRIC.
        console: where rank 0 says that the run ends.
    """

    def __init__(self, options: EarlyStopping, console: Console | None = None):
        self._options = options
        self._console = console or rich.get_console()
        self._best: float | None = None
        self._best_step = 0
        self._num_worse = 0
        self._losses = [0.0, 0.0]  # sum and number, of this epoch

    @property
    def has_stopped(self) -> bool:
        """Whether the run is over; a larger PATIENCE continues it."""
        return self._num_worse >= self._options.PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Return the best figure, the measurements since it, and the losses of an epoch in progress."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "num_worse": self._num_worse,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; see ``Hook``."""
        self._best, self._best_step = state["best"], int(state["best_step"])
        self._num_worse, self._losses = int(state["num_worse"]), list(state["losses"])

    def on_start(self, run: Run) -> None:
        """End a run at once that had stopped when it was saved."""
        if self.has_stopped:
            self._end(run)

    def on_record(self, run: Run, record: StepRecord) -> None:
        """Add up the losses of the epoch, which are equal on all ranks."""
        if record.loss is not None:
            self._losses = [self._losses[0] + record.loss, self._losses[1] + 1]

    def on_epoch_end(self, run: Run) -> None:
        """Compare the figure with the best. Collective.

        Raises:
            ConfigError: nothing has measured the figure: images have no labels.
        """
        metric, (total, count) = self._options.METRIC, self._losses
        self._losses = [0.0, 0.0]
        if (run.epoch + 1) % periods(run.plan.config)[metric] or run.step >= run.num_steps:
            return
        figure = total / count if metric == "loss" and count else run.results.get(f"{metric}_latest")
        if figure is None and metric != "loss":
            must = "must be a figure that this run measures"
            raise ConfigError([Problem(KEY, repr(metric), must, "It needs images with labels. Write loss.")])
        if figure is None:  # every step was skipped
            return
        figure = float(all_reduce_max(torch.tensor(figure, dtype=torch.float64)))
        self._compare(run.step, figure)
        if self.has_stopped:
            self._end(run)

    def _compare(self, step: int, figure: float) -> None:
        mode = self._options.MODE
        sign = -1 if mode == "min" or (mode == "auto" and self._options.METRIC == "loss") else 1
        best = -math.inf if self._best is None else sign * self._best
        if sign * figure > best + self._options.MIN_DELTA:
            self._best, self._best_step, self._num_worse = figure, step, 0
        else:
            self._num_worse += 1

    def _end(self, run: Run) -> None:
        run.num_steps = run.step
        run.results["early_stopping"] = {
            "metric": self._options.METRIC,
            "best": self._best,
            "best_step": self._best_step,
        }
        if run.is_main:
            said = f"stopped early: {self._options.METRIC} was best at step {self._best_step} ({self._best:.6g})"
            say(said, self._console)
