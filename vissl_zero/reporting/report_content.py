"""What a report shows, gathered before anything is drawn. Every part may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vissl_zero.engine.hook import StepRecord
from vissl_zero.sharding.strategy import Bytes


@dataclass(frozen=True)
class CropSample:
    """One source image and what the model saw of it.

    Attributes:
        original: (H, W, 3) uint8, or None where the source could not give it again.
        crops: one (h, w, 3) uint8 per crop, at the size the model got, large resolutions first.
    """

    original: np.ndarray | None
    crops: list[np.ndarray]


@dataclass(frozen=True)
class NeighbourRow:
    """A test image with the nearest training images before and after training, nearest first.

    Attributes:
        query: (H, W, 3) uint8.
        before, after: the same number of (H, W, 3) uint8 images.
        before_matches, after_matches: whether each has the query's label; None without labels.
    """

    query: np.ndarray
    before: list[np.ndarray]
    after: list[np.ndarray]
    before_matches: list[bool] | None = None
    after_matches: list[bool] | None = None


@dataclass(frozen=True)
class ReportContent:
    """Everything on the report.

    Attributes:
        title, subtitle: the recipe; level, engine, ranks, length.
        headlines: few (figure, what it is) pairs.
        records: the steps.
        steps_per_epoch: for the epoch marks of the kNN curve.
        trivial_loss: loss of guessing, drawn as a line; None where there is no such thing.
        knn: (optimizer step, top-1 from 0 to 1), in order; the first is before training.
        knn_raw_pixels: top-1 of kNN on raw pixels.
        top1: (optimizer step, top-1 of the classifier on TEST), in order.
        bytes_per_rank: peak of each kind.
        peak_kind: what Bytes.peak is: "resident" or "allocated".
        crops: some samples of the first batch.
        neighbours: some test images.
        patches: some test images, each with the principal components of its patches and, with a class token, attention.
    """

    title: str
    subtitle: str
    headlines: list[tuple[str, str]] = field(default_factory=list)
    records: Sequence[StepRecord] = field(default_factory=list)
    trivial_loss: float | None = None
    knn: list[tuple[int, float]] = field(default_factory=list)
    knn_raw_pixels: float | None = None
    top1: list[tuple[int, float]] = field(default_factory=list)
    bytes_per_rank: list[Bytes] = field(default_factory=list)
    peak_kind: str = "resident"
    crops: list[CropSample] = field(default_factory=list)
    neighbours: list[NeighbourRow] = field(default_factory=list)
    patches: list[CropSample] = field(default_factory=list)
