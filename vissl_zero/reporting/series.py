"""Curves from step records: one figure over the steps, thinned out for drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vissl_zero.engine.hook import StepRecord

_MOST_POINTS = 1500  # about what a panel has pixels for


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        steps: (n,) optimizer steps, ascending.
        values: (n,) finite.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self) -> Series:
        """Centred mean over a twentieth of the curve, over what there is of it at both ends; it does not lag."""
        half = max(1, len(self) // 40)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        places = np.arange(len(self))
        first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(self))
        return Series(self.steps, (sums[last] - sums[first]) / (last - first))


def series(records: Sequence[StepRecord], figure: Callable[[StepRecord], float | None]) -> Series:
    """The curve of one figure; steps where it is missing or not finite are left out.

    Long runs are thinned to 1,500 points, each the mean of its share of the steps.
    """
    points = [(record.step, figure(record)) for record in records]
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    steps, values = np.array([p[0] for p in known], dtype=float), np.array([p[1] for p in known], dtype=float)
    if len(known) > _MOST_POINTS:
        steps, values = (
            np.array([share.mean() for share in np.array_split(whole, _MOST_POINTS)]) for whole in (steps, values)
        )
    return Series(steps, values)
