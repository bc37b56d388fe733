"""The panels of a report, and the page on which they are placed.

The page has a fixed width. Panels are placed from top to bottom, in pixels. Panels with axes show curves over the
steps, and memory as stacked bars. Sheets show the first crops, and nearest neighbors before and after training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.source import Source
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.errors import DataError
from vissl_zero.reporting.quantity import bytes_text, largest, shown_kinds, total
from vissl_zero.resolve.components import normalization
from vissl_zero.sharding.memory import Bytes

WIDTH = 1600  # pixels
DPI = 100
MARGIN = 48
INK, SOFT, FAINT = "#1a1a1a", "#6b6b6b", "#e4e4e4"
# Okabe and Ito's palette: distinct with any color vision, and by lightness in gray.
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
    """A page on which axes are placed; coordinates are pixels from the top left corner.

    Draw in ``matplotlib.rc_context(STYLE)``.

    Args:
        height: height of the page, in pixels.
    """

    def __init__(self, height: int):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        # Not pyplot: it keeps every figure in memory, and picks a backend that may need a display.
        FigureCanvasAgg(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes whose drawing area is the box."""
        box = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def picture(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes without ticks or frame, whose coordinates are pixels from their own top left corner."""
        axes = self.axes(left, top, width, height)
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        return axes

    def text(self, left: float, top: float, text: str, size: float = 11, color: str = INK, bold: bool = False) -> None:
        """Draw text with its upper left corner at the point, or its upper right if ``left`` is the right margin."""
        align = "right" if left == WIDTH - MARGIN else "left"
        weight = "bold" if bold else "normal"
        x, y = left / WIDTH, 1 - top / self.height
        self.figure.text(x, y, text, fontsize=size, color=color, weight=weight, va="top", ha=align)


@dataclass(frozen=True)
class CropSample:
    """A source image and its crops.

    Attributes:
        original: source image, (H, W, 3) uint8; None if the source could not read it again.
        crops: crops of the model's input size, each (h, w, 3) uint8, large resolutions first.
    """

    original: np.ndarray | None
    crops: list[np.ndarray]


@dataclass(frozen=True)
class NeighborRow:
    """A test image with the nearest training images before and after training.

    Attributes:
        query: test image, (H, W, 3) uint8.
        before, after: training images, each (H, W, 3) uint8, nearest first; as many before as after.
        before_matches, after_matches: whether each image has the query's label; None without labels.
    """

    query: np.ndarray
    before: list[np.ndarray]
    after: list[np.ndarray]
    before_matches: list[bool] | None = None
    after_matches: list[bool] | None = None


@dataclass(frozen=True)
class ReportContent:
    """The content of a report.

    Attributes:
        title, subtitle: name of the recipe; level, engine, ranks and length of the run.
        headlines: a few pairs of a result and its description.
        findings: sentences on what went wrong.
        records: records of the steps.
        steps_per_epoch: steps per epoch, for the epoch marks of the kNN curve.
        trivial_loss: loss of guessing, drawn as a line; None if the method has none.
        knn: (optimizer step, top-1 from 0 to 1), in order; the first is before training.
        knn_raw_pixels: top-1 of kNN on raw pixels.
        top1: (optimizer step, top-1 of the classifier on TEST), in order.
        miou: (optimizer step, mean intersection over union on TEST), in order.
        bytes_per_rank: peak bytes of each kind on each rank.
        peak_kind: meaning of ``Bytes.peak``: "resident" or "allocated".
        crops: some samples of the first batch.
        neighbors: some test images.
        patches: some test images, each with the principal components of its patches and, with a class token, attention.
        segmented: some test images, each with mask and prediction.
    """

    title: str
    subtitle: str
    headlines: list[tuple[str, str]] = field(default_factory=list)
    findings: Sequence[str] = ()
    records: Sequence[StepRecord] = field(default_factory=list)
    trivial_loss: float | None = None
    knn: list[tuple[int, float]] = field(default_factory=list)
    knn_raw_pixels: float | None = None
    top1: list[tuple[int, float]] = field(default_factory=list)
    miou: list[tuple[int, float]] = field(default_factory=list)
    bytes_per_rank: list[Bytes] = field(default_factory=list)
    peak_kind: str = "resident"
    crops: list[CropSample] = field(default_factory=list)
    neighbors: list[NeighborRow] = field(default_factory=list)
    patches: list[CropSample] = field(default_factory=list)
    segmented: list[CropSample] = field(default_factory=list)


_MOST_POINTS = 1500  # about the pixels of a panel's width


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        steps: optimizer steps, (n,), ascending.
        values: finite values, (n,).
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self) -> Series:
        """Return the centered mean over a twentieth of the curve, less at both ends; it does not lag."""
        half = max(1, len(self) // 40)
        # By differences of prefix sums: one pass for any width of the window.
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        places = np.arange(len(self))
        first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(self))
        return Series(self.steps, (sums[last] - sums[first]) / (last - first))


def series(records: Sequence[StepRecord], figure: Callable[[StepRecord], float | None]) -> Series:
    """Return the curve of a metric; steps without a finite value are left out.

    Long runs are reduced to 1,500 points, each the mean of consecutive steps.
    """
    points = [(record.step, figure(record)) for record in records]
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    steps, values = np.array([p[0] for p in known], dtype=float), np.array([p[1] for p in known], dtype=float)
    if len(known) > _MOST_POINTS:
        steps, values = (
            np.array([share.mean() for share in np.array_split(whole, _MOST_POINTS)]) for whole in (steps, values)
        )
    return Series(steps, values)


_ROUND = [1, 2, 5, 10]  # steps between ticks, up to a power of ten
KIND_COLORS = {
    "params": BLUE,
    "grads": SKY,
    "optimizer": ORANGE,
    "activations": PURPLE,
    "buffers": GREY,
    "teacher": GREEN,
}


def draw_loss(axes: Axes, records: Sequence[StepRecord], trivial_loss: float | None) -> None:
    """Draw the loss of every step, its running mean, and the loss of guessing."""
    curve = series(records, lambda record: record.loss)
    axes.set_title("Loss")
    _draw(axes, curve, BLUE, is_noisy=True)
    if trivial_loss is not None:
        _draw_reference(axes, trivial_loss, f"guessing: {trivial_loss:.3f}")
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        axes.plot(skipped, [0.02] * len(skipped), "x", color=VERMILLION, transform=axes.get_xaxis_transform())
        axes.text(
            0.01, 0.05, f"x: {len(skipped)} steps skipped by the loss scaler", transform=axes.transAxes, color=SOFT
        )


def draw_figure(axes: Axes, title: str, curve: Series, color: str, is_noisy: bool) -> None:
    """Draw a curve over the steps."""
    axes.set_title(title)
    _draw(axes, curve, color, is_noisy)


def draw_top1(axes: Axes, title: str, points: Sequence[tuple[int, float]], raw_pixels: float | None = None) -> None:
    """Draw top-1 at the steps at which it was measured, and top-1 of kNN on raw pixels for comparison."""
    axes.set_title(title)
    steps, values = [point[0] for point in points], [point[1] for point in points]
    axes.plot(steps, values, "o-", color=GREEN, markersize=6)
    shown = [values[0], values[-1]] if len(values) > 1 else values
    for step, value in zip([steps[0], steps[-1]], shown, strict=False):
        axes.annotate(
            f"{100 * value:.1f} %", (step, value), xytext=(0, 9), textcoords="offset points", ha="center", color=GREEN
        )
    if raw_pixels is not None:
        _draw_reference(axes, raw_pixels, f"raw pixels {100 * raw_pixels:.1f} %")
    axes.margins(x=0.12, y=0.18)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    _label_steps(axes)
    if len(steps) == 1:
        axes.set_xticks(steps)


def draw_memory(axes: Axes, per_rank: Sequence[Bytes], peak_kind: str) -> None:
    """Draw a bar per rank of the stacked bytes of each kind, and next to it the sum and the measured peak."""
    axes.set_title("Memory by kind, peak of each rank")
    axes.grid(False)
    lefts = [0.0] * len(per_rank)
    kinds = shown_kinds(*per_rank)
    for kind, name in kinds.items():
        widths = [float(getattr(memory, kind)) for memory in per_rank]
        axes.barh(range(len(per_rank)), widths, left=lefts, height=0.62, color=KIND_COLORS[kind], label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for rank, memory in enumerate(per_rank):
        text = f"{bytes_text(total(memory))}   ({bytes_text(memory.peak)} {peak_kind})"
        axes.annotate(text, (lefts[rank], rank), xytext=(8, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(per_rank)), [f"rank {rank}" for rank in range(len(per_rank))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max(1, *lefts))  # room for the text
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    most = largest(per_rank)
    handles, labels = axes.get_legend_handles_labels()
    labels = [f"{label} {bytes_text(getattr(most, kind))}" for label, kind in zip(labels, kinds, strict=True)]
    # The legend is below, because six kinds do not fit next to the title.
    axes.legend(handles, labels, ncols=len(kinds), loc="upper left", bbox_to_anchor=(-0.01, 0.0), fontsize=10)


def _draw(axes: Axes, curve: Series, color: str, is_noisy: bool) -> None:
    if len(curve) < 3:
        axes.plot(curve.steps, curve.values, "o-", color=color, markersize=7)
    elif is_noisy:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.28, linewidth=1.0)
        smooth = curve.smooth()
        axes.plot(smooth.steps, smooth.values, color=color)
    else:
        axes.plot(curve.steps, curve.values, color=color)
    axes.margins(x=0.01, y=0.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")  # matplotlib's default draws "1e-7" over the title
    _label_steps(axes)


def _draw_reference(axes: Axes, value: float, text: str) -> None:
    """Draw a dashed reference line, with its label above the right end."""
    axes.axhline(value, color=SOFT, linewidth=1.2, linestyle=(0, (5, 4)))
    place, frame, offset = (1, value), ("axes fraction", "data"), (-4, 4)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid behind the label
    style: dict[str, Any] = {"ha": "right", "fontsize": 9.5, "color": SOFT, "bbox": box}
    axes.annotate(text, place, offset, xycoords=frame, textcoords="offset points", **style)


def _label_steps(axes: Axes) -> None:
    axes.set_xlabel("step", loc="right", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND))


_NUM_SAMPLES = 8


def first_crops(run: Run) -> list[CropSample]:
    """Load samples of this rank's first batch; empty if the images cannot be read. Cost: loads one step."""
    try:
        batch = next(iter(run.loader.epoch(0)))[0].to("cpu", torch.float32)
    except DataError:  # a report must not fail a run that has ended well
        return []
    return crop_samples(batch, run.loader.source, run.plan.config.DATA.TRAIN.TRANSFORMS)


def crop_samples(batch: ImageBatch, source: Source, transforms: Sequence[Mapping[str, Any]]) -> list[CropSample]:
    """Convert the first samples of a batch into pictures.

    Args:
        batch: batch of the loader, on the CPU.
        source: source of the samples.
        transforms: TRANSFORMS, whose mean and standard deviation are undone.
    """
    samples = []
    for sample in range(min(_NUM_SAMPLES, batch.num_local)):
        crops = [
            denormalized(images[crop * batch.num_local + sample], transforms)
            for images, num_crops in zip(batch.images, batch.num_crops, strict=True)
            for crop in range(num_crops)
        ]
        crops.sort(key=lambda crop: -crop.shape[0])
        samples.append(CropSample(original(source, int(batch.sample_ids[sample])), crops))
    return samples


def original(source: Source, index: int) -> np.ndarray | None:
    """Load an image of a source as (H, W, 3) uint8, at most 256 pixels a side; None if it cannot be read."""
    try:
        image = source.image(index)
    except (DataError, OSError):
        return None
    image.thumbnail((256, 256))
    return np.asarray(image.convert("RGB"))


def denormalized(image: Tensor, transforms: Sequence[Any]) -> np.ndarray:
    """Undo the normalization of an image (C, h, w) per channel. Return a picture (h, w, 3) uint8.

    If the channels are not red, green and blue, the picture is the first channel in gray.
    """
    mean, std = normalization(transforms, len(image))
    picture = image.double().numpy().transpose(1, 2, 0) * np.array(std) + np.array(mean)
    picture = picture if picture.shape[2] == 3 else picture[..., :1].repeat(3, axis=2)
    return np.rint(picture.clip(0, 1) * 255).astype(np.uint8)


_GAP = 6  # pixels between pictures
_LABEL = 22  # height of the label above pictures
_LARGEST_TILE = 126
_CROP_COLUMNS = 2


def crops_height(samples: Sequence[CropSample], width: float) -> float:
    """Return the height in pixels that ``draw_crops`` needs."""
    rows = math.ceil(len(samples) / _CROP_COLUMNS)
    return _LABEL + rows * (_crop_tile(samples, width) + _GAP)


def draw_crops(axes: Axes, samples: Sequence[CropSample], width: float, label: str = "") -> None:
    """Draw each sample's image, then its crops in their relative sizes.

    Args:
        axes: axes to draw on.
        samples: images with their crops.
        width: width in pixels.
        label: label above the crops; empty: number and sizes of the crops.
    """
    tile = _crop_tile(samples, width)
    column_width = (width - 8 * _GAP) / _CROP_COLUMNS + 8 * _GAP
    largest = max(max(crop.shape[:2]) for sample in samples for crop in sample.crops)
    for column in range(min(_CROP_COLUMNS, len(samples))):
        left = column * column_width
        axes.text(left, 12, "image", color=SOFT, fontsize=9.5)
        axes.text(left + tile + 3 * _GAP, 12, label or _crop_label(samples[0]), color=SOFT, fontsize=9.5)
    for index, sample in enumerate(samples):
        left = (index % _CROP_COLUMNS) * column_width
        top = _LABEL + (index // _CROP_COLUMNS) * (tile + _GAP)
        if sample.original is not None:
            _show(axes, sample.original, left, top, tile)
        left += tile + 3 * _GAP
        for crop in sample.crops:
            side = tile * max(crop.shape[:2]) / largest
            _show(axes, crop, left, top + (tile - side) / 2, side)
            left += side + _GAP


def _crop_tile(samples: Sequence[CropSample], width: float) -> float:
    largest = max(max(crop.shape[:2]) for sample in samples for crop in sample.crops)
    in_tiles = 1 + max(sum(max(crop.shape[:2]) / largest for crop in sample.crops) for sample in samples)
    most_crops = max(len(sample.crops) for sample in samples)
    room = (width - 8 * _GAP) / _CROP_COLUMNS - (most_crops + 3) * _GAP
    return min(_LARGEST_TILE, room / in_tiles)


def _crop_label(sample: CropSample) -> str:
    """Format ``"what the model saw: 2 crops of 32 x 32, 4 of 16 x 16 pixels"``."""
    sizes = [f"{crop.shape[1]} x {crop.shape[0]}" for crop in sample.crops]
    counted = [f"{sizes.count(size)} of {size}" for size in dict.fromkeys(sizes)]
    return f"what the model saw: {', '.join(counted)} pixels"


def neighbors_height(rows: Sequence[NeighborRow], width: float) -> float:
    """Return the height in pixels that ``draw_neighbors`` needs."""
    return _LABEL + len(rows) * (_neighbor_tile(rows, width) + _GAP)


def draw_neighbors(axes: Axes, rows: Sequence[NeighborRow], width: float) -> None:
    """Draw a test image per row, then its nearest training images before and after training."""
    tile = _neighbor_tile(rows, width)
    num = len(rows[0].before)
    block = num * (tile + _GAP)
    lefts = {"test image": 0.0, "nearest before training": tile + 5 * _GAP}
    lefts["nearest after training"] = lefts["nearest before training"] + block + 4 * _GAP
    for name, left in lefts.items():
        axes.text(left, 12, name, color=SOFT, fontsize=9.5)
    _, before_left, after_left = lefts.values()
    for index, row in enumerate(rows):
        top = _LABEL + index * (tile + _GAP)
        _show(axes, row.query, 0, top, tile)
        for left, pictures, matches in (
            (before_left, row.before, row.before_matches),
            (after_left, row.after, row.after_matches),
        ):
            for place, picture in enumerate(pictures):
                color = None if matches is None else BLUE if matches[place] else VERMILLION
                _show(axes, picture, left + place * (tile + _GAP), top, tile, color)


def _neighbor_tile(rows: Sequence[NeighborRow], width: float) -> float:
    num = len(rows[0].before)
    return min(_LARGEST_TILE, (width - 9 * _GAP) / (1 + 2 * num) - _GAP)


def _show(axes: Axes, picture: np.ndarray, left: float, top: float, side: float, border: str | None = None) -> None:
    """Draw a picture, its longer side ``side`` pixels, centered in a square, with a border of the color ``border``."""
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    left += (side - width * scale) / 2
    top += (side - height * scale) / 2
    box = (left, left + width * scale, top + height * scale, top)
    limits = axes.get_xlim(), axes.get_ylim()  # imshow would fit the axes to the picture
    axes.imshow(picture, extent=box, aspect="auto")
    axes.set(xlim=limits[0], ylim=limits[1])
    if border is not None:
        axes.add_patch(
            Rectangle((left, top), width * scale, height * scale, fill=False, edgecolor=border, linewidth=2.5)
        )
