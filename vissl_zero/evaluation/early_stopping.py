"""Early stopping of a run whose metric no longer improves (``HOOKS.EARLY_STOPPING``)."""

from __future__ import annotations

from typing import Any

import rich
from rich.console import Console

from vissl_zero.config.blocks.output import EarlyStopping
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.evaluation.followed_figure import FollowedFigure
from vissl_zero.resolve.followed_figure import EARLY_STOPPING
from vissl_zero.terminal import print_line


class EarlyStoppingHook(Hook):
    """Ends the run, as after its last step, when PATIENCE measurements in a row have not improved the metric.

    Place it after hooks that measure, and before hooks that save. It adds ``early_stopping`` to the results. Cost: an
    all-reduce of a number at each measurement, so that every rank decides by the same value.

    Args:
        options: the block ``HOOKS.EARLY_STOPPING``, with a METRIC.
        console: console on which rank 0 announces the end; None: rich's global console.
    """

    def __init__(self, options: EarlyStopping, console: Console | None = None):
        self._options = options
        self._console = console or rich.get_console()
        self._best: float | None = None
        self._best_step = 0
        self._num_worse = 0
        self._figure = FollowedFigure(options.METRIC, EARLY_STOPPING, options.MODE)

    @property
    def has_stopped(self) -> bool:
        """Return whether the run has stopped early; a larger PATIENCE continues it."""
        return self._num_worse >= self._options.PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of measurements since then, and the losses of an epoch in progress."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "num_worse": self._num_worse,
            **self._figure.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; see ``Hook``."""
        self._best, self._best_step = state["best"], int(state["best_step"])
        self._num_worse = int(state["num_worse"])
        self._figure.load_state_dict(state)

    def on_start(self, run: Run) -> None:
        """End the run at once if it had stopped early when it was saved."""
        if self.has_stopped:
            self._end(run)

    def on_record(self, run: Run, record: StepRecord) -> None:
        """Add up the losses of the epoch, which are equal on all ranks."""
        self._figure.add(record)

    def on_epoch_end(self, run: Run) -> None:
        """Compare the metric with its best value. Collective.

        Raises:
            ConfigError: no hook has measured the metric, because images have no labels.
        """
        figure = self._figure.at_epoch_end(run)
        if figure is None:
            return
        if self._figure.is_better(figure, self._best, self._options.MIN_DELTA):
            self._best, self._best_step, self._num_worse = figure, run.step, 0
        else:
            self._num_worse += 1
        if self.has_stopped:
            self._end(run)

    def _end(self, run: Run) -> None:
        # Not ``run.stop``, which would leave the loop without the measurements and files of a run's end.
        run.num_steps = run.step
        run.results["early_stopping"] = {
            "metric": self._options.METRIC,
            "best": self._best,
            "best_step": self._best_step,
        }
        if run.is_main:
            sentence = f"stopped early: {self._options.METRIC} was best at step {self._best_step} ({self._best:.6g})"
            print_line(sentence, self._console)
