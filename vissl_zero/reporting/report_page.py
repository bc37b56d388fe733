"""A page of a fixed width on which panels are placed by the pixel, top to bottom."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
