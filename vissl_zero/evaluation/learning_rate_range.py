"""The learning-rate range test: the rate grows in each step until the loss explodes (``vissl-zero lr-find``).

Leslie Smith, https://arxiv.org/abs/1506.01186; range, smoothing and end are fastai's (``Learner.lr_find``).
"""

from __future__ import annotations

from collections.abc import Sequence

from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.registry import HOOKS

LOWEST, HIGHEST = 1e-7, 10.0
# Both numbers are those of fastai's ``lr_find``.
_MOMENTUM = 0.98  # weight of the past in the smoothed loss
_EXPLODED = 4.0  # an exploded loss is this factor above the lowest smoothed loss


class SmoothLoss:
    """A running mean of losses, corrected for its start at zero."""

    def __init__(self) -> None:
        self._mean, self._num = 0.0, 0

    def add(self, loss: float) -> float:
        """Add a loss and return the mean."""
        self._num += 1
        self._mean = _MOMENTUM * self._mean + (1 - _MOMENTUM) * loss
        return self._mean / (1 - _MOMENTUM**self._num)


@HOOKS.register("learning_rate_range_test")
class LearningRateRangeTest(Hook):
    """Multiplies the rates by a factor that grows geometrically from 1e-7 to 10; ends the run if the loss explodes.

    Losses are equal on all ranks, so the rates and the end are too.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._smooth = SmoothLoss()
        self._best = float("inf")

    def on_start(self, run: Run) -> None:
        self._num_steps = run.num_steps
        run.lr_factor = LOWEST

    def on_step(self, run: Run, step: Step) -> None:
        run.lr_factor = LOWEST * (HIGHEST / LOWEST) ** (step.step / max(self._num_steps - 1, 1))

    def on_record(self, run: Run, record: StepRecord) -> None:
        if record.loss is None:
            return
        smooth = self._smooth.add(record.loss)
        self._best = min(self._best, smooth)
        # Only for positive losses: a multiple of a negative one is lower.
        if smooth > _EXPLODED * self._best > 0:
            run.num_steps = run.step


def suggested(rates: Sequence[float], losses: Sequence[float]) -> tuple[float | None, list[float]]:
    """Suggest a learning rate: the middle of the longest fall of the smoothed loss, as fastai's ``valley``.

    Args:
        rates: learning rates, ascending.
        losses: losses of the same steps.
    Returns:
        The rate (None: the loss never falls), and the smoothed losses.
    """
    mean = SmoothLoss()
    smooth = [mean.add(loss) for loss in losses]
    lengths, before = [1] * len(smooth), list(range(len(smooth)))
    for end in range(len(smooth)):
        # Quadratic in the number of steps, of which a test has some hundreds.
        for start in range(end):
            if smooth[end] < smooth[start] and lengths[end] <= lengths[start]:
                lengths[end], before[end] = lengths[start] + 1, start
    if max(lengths, default=1) == 1:
        return None, smooth
    path = [lengths.index(max(lengths))]
    while before[path[-1]] != path[-1]:
        path.append(before[path[-1]])
    return rates[path[len(path) // 2]], smooth
