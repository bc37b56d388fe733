"""A crop whose changes are recorded when they are drawn, and applied on the device (``DATA.AUGMENT_ON: device``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vissl_zero.data.changes import DROPPED, Change, Kind


class NotedPicture:
    """Pixels and their recorded changes: stands for a ``Picture`` in every form that moves no pixels.

    Changes of color are folded into one matrix, and clipped to 8 bits at the same positions as in ``Colors``.

    Args:
        pixels: (H, W, 3) uint8.
    """

    dtype = torch.uint8

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels
        self.noted: list[list[Change]] = []  # by transform, so that crops with an equal change share a round
        self._is_pending = self._may_leave = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W)."""
        height, width, _ = self.pixels.shape
        return 3, height, width

    @property
    def colors(self) -> NotedPicture:
        """This picture, which records changes of color."""
        return self

    def opened(self) -> NotedPicture:
        """Return this picture."""
        return self

    def settle(self) -> None:
        """Record that pending changes of color are applied and clipped to 8 bits."""
        if self._is_pending:
            self._note(Kind.SETTLE)
            self._is_pending = self._may_leave = False

    def brighten(self, factor: float) -> None:
        """Multiply all values."""
        self._color(Kind.COLOR, factor > 1, factor, 0.0, DROPPED)

    def stretch(self, factor: float) -> None:
        """Change the contrast."""
        self._color(Kind.CONTRAST, factor > 1, factor)

    def saturate(self, factor: float) -> None:
        """Change the saturation."""
        self._color(Kind.COLOR, factor > 1, factor, 1 - factor, DROPPED)

    def gray(self) -> None:
        """Set all channels to the gray value."""
        self._color(Kind.COLOR, False, 0.0, 1.0, 0.0)

    def turn_hue(self, shift: float) -> None:
        """Shift the hue by a part of the circle, -0.5 to 0.5."""
        if steps := int(shift * 255) % 256:
            self._change(Kind.HUE, steps)

    def mirror(self) -> None:
        """Swap left and right."""
        self._note(Kind.MIRROR)

    def blur(self, kernel: Sequence[float] | np.ndarray) -> None:
        """Filter along columns and rows with a symmetric kernel."""
        self._change(Kind.BLUR, *map(float, kernel))

    def solarize(self, threshold: float) -> None:
        """Invert values from a threshold up."""
        self._change(Kind.SOLARIZE, threshold)

    def posterize(self, bits: int) -> None:
        """Keep the upper bits of values."""
        self._change(Kind.POSTERIZE, bits)

    def sharpen(self, share: float) -> None:
        """Blend with a smoothed copy."""
        self._change(Kind.SHARPEN, share)

    def spread(self) -> None:
        """Spread each channel over 0 to 255."""
        self._change(Kind.SPREAD)

    def stroke(self, is_thicker: bool, share: float) -> None:
        """Blend with the 3 x 3 maximum (thicker) or minimum filter of the image."""
        self._change(Kind.THICKEN if is_thicker else Kind.THIN, share)

    def _color(self, kind: Kind, may_leave: bool, *values: float) -> None:
        if self._may_leave:
            self.settle()
        self._note(kind, *values)
        self._is_pending, self._may_leave = True, may_leave

    def _change(self, kind: Kind, *values: float) -> None:
        self.settle()
        self._note(kind, *values)

    def _note(self, kind: Kind, *values: float) -> None:
        self.noted[-1].append((kind, values))
