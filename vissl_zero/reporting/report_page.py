"""A page of a fixed width on which panels are placed by the pixel, top to bottom.

What a report shows, gathered before anything is drawn. Every part may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vissl_zero.engine.hook import StepRecord
from vissl_zero.sharding.strategy import Bytes

WIDTH = 1600  # pixels
DPI = 100
MARGIN = 48
INK, SOFT, FAINT = "#1a1a1a", "#6b6b6b", "#e4e4e4"
# Okabe and Ito's palette: told apart with any colour vision, and in grey by lightness.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, GREY = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#9a9a9a",
)
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlecolor": INK,
    "grid.color": FAINT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


class Page:
    """Places axes from the top; coordinates are pixels from the top left corner.

    Draw within ``matplotlib.rc_context(STYLE)``.

    Args:
        height: of the page, in pixels.
    """

    def __init__(self, height: int):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """New axes whose drawing area is this box."""
        box = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def picture(self, left: float, top: float, width: float, height: float) -> Axes:
        """New axes without ticks or frame, measured in pixels from their own top left corner."""
        axes = self.axes(left, top, width, height)
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        return axes

    def text(self, left: float, top: float, text: str, size: float = 11, color: str = INK, bold: bool = False) -> None:
        """Text whose upper left corner is here, or its upper right one if ``left`` is the right margin."""
        align = "right" if left == WIDTH - MARGIN else "left"
        weight = "bold" if bold else "normal"
        x, y = left / WIDTH, 1 - top / self.height
        self.figure.text(x, y, text, fontsize=size, color=color, weight=weight, va="top", ha=align)


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
