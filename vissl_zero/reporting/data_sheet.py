"""A picture of a source: samples of its images, and the sizes of its classes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageOps

from vissl_zero.atomic import replacing
from vissl_zero.errors import printable
from vissl_zero.reporting.panels import BLUE, INK, MARGIN, SOFT, STYLE, WIDTH, Page

NUM_SAMPLES = 48
_ACROSS = 12
_SIDE, _GAP, _CAPTION = 112, 14, 22  # pixels
_BARS_HEIGHT = 300
_MOST_NAMED = 40  # most classes whose names fit under their bars


def write_sheet(path: Path, title: str, samples: Sequence[tuple[Image.Image, str]], classes: Mapping[str, int]) -> None:
    """Write the picture as PNG.

    Args:
        path: path of the picture; an existing file is replaced.
        title: headline of the picture.
        samples: images and their captions.
        classes: name of a class -> number of its images; empty without labels.
    """
    rows = math.ceil(len(samples) / _ACROSS)
    bars_top = MARGIN + 48 + rows * (_SIDE + _CAPTION + _GAP)
    page = Page(bars_top + (_BARS_HEIGHT + 160 if classes else MARGIN // 2))
    with mpl.rc_context(STYLE):
        page.text(MARGIN, MARGIN // 2, printable(title), size=16, bold=True)
        for number, (image, caption) in enumerate(samples):
            down, across = divmod(number, _ACROSS)
            left, top = MARGIN + across * (_SIDE + _GAP), MARGIN + 36 + down * (_SIDE + _CAPTION + _GAP)
            # Padded, not cropped: the sheet is there to show what images really look like.
            small = ImageOps.pad(image, (_SIDE, _SIDE), color="white")
            page.picture(left, top, _SIDE, _SIDE).imshow(np.asarray(small), extent=(0, _SIDE, _SIDE, 0))
            page.text(left, top + _SIDE + 4, _short(caption), size=8, color=SOFT)
        if classes:
            _draw_classes(page, bars_top + 40, classes)
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # matplotlib's font lacks some letters
        page.figure.savefig(temporary, format="png")


def _draw_classes(page: Page, top: float, classes: Mapping[str, int]) -> None:
    axes = page.axes(MARGIN + 40, top, WIDTH - 2 * MARGIN - 40, _BARS_HEIGHT)
    ordered = sorted(classes.items(), key=lambda pair: -pair[1])
    axes.bar(range(len(ordered)), [images for _, images in ordered], color=BLUE, width=0.8)
    axes.set_title(f"{len(ordered):,} classes, largest first", color=INK)
    axes.set_ylabel("images")
    axes.set_xlim(-0.6, len(ordered) - 0.4)
    if len(ordered) <= _MOST_NAMED:
        axes.set_xticks(range(len(ordered)), [_short(name) for name, _ in ordered], rotation=40, ha="right", fontsize=9)
    else:
        axes.set_xticks([])


def _short(text: str) -> str:
    text = printable(text).replace("$", r"\$")  # matplotlib would read text between two $ as mathematics
    return text if len(text) <= 18 else f"{text[:17]}…"
