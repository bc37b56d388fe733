"""The panels with axes: curves over the steps, and memory as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vissl_zero.engine.hook import StepRecord
from vissl_zero.reporting.memory_kinds import largest, shown_kinds, total
from vissl_zero.reporting.quantity import bytes_text
from vissl_zero.reporting.report_page import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, SOFT, VERMILLION
from vissl_zero.sharding.strategy import Bytes

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


_ROUND = [1, 2, 5, 10]  # steps between ticks, times a power of ten
KIND_COLORS = {
    "params": BLUE,
    "grads": SKY,
    "optimizer": ORANGE,
    "activations": PURPLE,
    "buffers": GREY,
    "teacher": GREEN,
}


def draw_loss(axes: Axes, records: Sequence[StepRecord], trivial_loss: float | None) -> None:
    """The loss of every step, its running mean, and the loss of guessing."""
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
    """Any one figure over the steps."""
    axes.set_title(title)
    _draw(axes, curve, color, is_noisy)


def draw_top1(axes: Axes, title: str, points: Sequence[tuple[int, float]], raw_pixels: float | None = None) -> None:
    """Top-1 at the steps where it was measured, with that of kNN on raw pixels for comparison."""
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


def draw_memory(axes: Axes, per_rank: Sequence[Bytes], peak_kind: str) -> None:
    """Bytes of each kind, stacked, a bar per rank; beside it what is seen from outside."""
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
    axes.legend(handles, labels, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=10)


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
    _label_steps(axes)


def _draw_reference(axes: Axes, value: float, text: str) -> None:
    """What the curve is compared with: a dashed line, its text above the right end."""
    axes.axhline(value, color=SOFT, linewidth=1.2, linestyle=(0, (5, 4)))
    place, frame, offset = (1, value), ("axes fraction", "data"), (-4, 4)
    axes.annotate(text, place, offset, xycoords=frame, textcoords="offset points", ha="right", fontsize=9.5, color=SOFT)


def _label_steps(axes: Axes) -> None:
    axes.set_xlabel("step", loc="right", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND))
