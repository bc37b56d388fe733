"""The picture of a learning-rate range test: the loss over the rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_ROOM = 0.1  # space above and below the smoothed curve, as a share of its height


def draw_rates(
    rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], suggested: float, path: Path
) -> None:
    """Draw the losses, their running mean and the suggested rate, and write the picture to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    # Not pyplot, which picks a backend that may need a display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(rates, losses, color="#9a9a9a", linewidth=0.8, label="loss of a step")
    axes.plot(rates, smooth, color="#0072B2", label="smoothed")
    axes.axvline(suggested, color="#D55E00", linestyle="--", label=f"{suggested:.2g}")
    # The axis follows the smoothed curve: a single exploding step would flatten all others.
    height = max(smooth) - min(smooth)
    axes.set_ylim(min(smooth) - _ROOM * height, max(smooth) + _ROOM * height)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
