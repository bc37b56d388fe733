"""How far a run is: what the displays say that one step alone does not know (time left, the loss so far)."""

from __future__ import annotations

import math

from vissl_zero.engine.hook import Run, StepRecord

_SMOOTHING = 0.1  # weight of the newest step in the running speed


class LossHistory:
    """The loss from the first step to the last in a bounded number of means, so that a year's run costs the same.

    Args:
        capacity: most values kept; even. When it is reached, neighbours are merged and each then stands for twice as
            many steps.
    """

    def __init__(self, capacity: int = 64):
        self._capacity = capacity
        self._steps_per_value = 1
        self._values: list[float] = []
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Append the loss of one step."""
        self._pending.append(loss)
        if len(self._pending) < self._steps_per_value:
            return
        self._values.append(sum(self._pending) / len(self._pending))
        self._pending.clear()
        if len(self._values) == self._capacity:
            self._values = [(a + b) / 2 for a, b in zip(self._values[::2], self._values[1::2], strict=True)]
            self._steps_per_value *= 2

    def values(self) -> list[float]:
        """Means over equal numbers of steps, oldest first."""
        return list(self._values)


class Progress:
    """Follows a run step by step.

    Attributes:
        loss_first: of the first step that was not skipped, None before.
        num_skipped: steps the loss scaler skipped.
        images_per_s: running mean; NaN before the first step.
        losses: the loss so far.
    """

    def __init__(self, run: Run):
        self._num_steps = run.num_steps
        self._global_batch = run.plan.global_batch
        self._step = run.step
        self._num_seen = 0
        self._seconds_per_step = math.nan
        self.loss_first: float | None = None
        self.num_skipped = 0
        self.losses = LossHistory()

    def update(self, record: StepRecord) -> None:
        """Take in the newest step."""
        self._step = record.step
        self._num_seen += 1
        seconds = self._global_batch / record.images_per_s
        if self._num_seen <= 2:  # the first step also measures activations: forget it as soon as there is another
            self._seconds_per_step = seconds
        else:
            self._seconds_per_step += _SMOOTHING * (seconds - self._seconds_per_step)
        if record.skipped:
            self.num_skipped += 1
        if record.loss is not None and math.isfinite(record.loss):
            self.loss_first = record.loss if self.loss_first is None else self.loss_first
            self.losses.add(record.loss)

    @property
    def images_per_s(self) -> float:
        return self._global_batch / self._seconds_per_step

    @property
    def time_left_s(self) -> float:
        """Training time to the last step, evaluation apart; NaN before the first step."""
        return (self._num_steps - self._step) * self._seconds_per_step

    @property
    def fraction(self) -> float:
        """Of the steps, from 0 to 1."""
        return self._step / max(1, self._num_steps)
