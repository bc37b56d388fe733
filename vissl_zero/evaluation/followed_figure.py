"""The metric that early stopping or the best weights follow."""

from __future__ import annotations

import math
from typing import Any

import torch

from vissl_zero.collectives import all_reduce_max
from vissl_zero.engine.hook import MeanLoss, Run, StepRecord
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.followed_figure import periods

_AT_END = {"top1": "top1", "miou": "miou", "knn_top1": "knn_top1_after", "probe_top1": "probe_top1"}


class FollowedFigure:
    """Reads one metric of a run after each measurement; its value is equal on all ranks.

    Args:
        metric: loss (mean of an epoch), top1, miou, knn_top1 or probe_top1.
        key: configuration key that names the metric, for messages.
        mode: max if larger values are better, min if smaller ones are; auto: min for loss, max for the others.
    """

    def __init__(self, metric: str, key: str, mode: str = "auto"):
        self.metric, self._key = metric, key
        self._sign = -1 if mode == "min" or (mode == "auto" and metric == "loss") else 1
        self._loss = MeanLoss()  # of this epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of an epoch in progress."""
        return {"losses": [self._loss.total, self._loss.num_samples]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._loss = MeanLoss(*state["losses"])

    def add(self, record: StepRecord) -> None:
        """Add the loss of a step, which is equal on all ranks."""
        self._loss.add(record)

    def at_epoch_end(self, run: Run) -> float | None:
        """Return the metric if this epoch has measured it, and is not the last; else None. Collective.

        Raises:
            ConfigError: no hook has measured the metric, because images have no labels.
        """
        # There is no later step to stop before; files of the best weights take the last value from ``at_end``.
        if run.step >= run.num_steps:
            return None
        loss, self._loss = self._loss.value, MeanLoss()
        if not run.is_due(periods(run.plan.config).get(self.metric, 0)):
            return None
        if self.metric == "loss":
            return None if loss is None else _shared(loss)
        if (figure := run.results.get(f"{self.metric}_latest")) is None:
            must = "must be a figure that this run measures"
            raise ConfigError([Problem(self._key, repr(self.metric), must, "It needs images with labels. Write loss.")])
        return _shared(figure)

    def at_end(self, run: Run) -> float | None:
        """Return the metric at the end of the run; None if no hook has measured it. Collective."""
        figure = self._loss.value if self.metric == "loss" else run.results.get(_AT_END[self.metric])
        return None if figure is None else _shared(figure)

    def is_better(self, figure: float, best: float | None, by: float = 0.0) -> bool:
        """Check whether ``figure`` is better than ``best`` by more than ``by``."""
        return self._sign * figure > (-math.inf if best is None else self._sign * best) + by


def _shared(figure: float) -> float:
    """Return the maximum over ranks, so that all decide by the same value. Collective."""
    # The values are equal already. A collective guards against ranks that would decide differently and then wait for
    # each other.
    return float(all_reduce_max(torch.tensor(figure, dtype=torch.float64)))
