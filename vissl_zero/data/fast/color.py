"""Changes of color as one matrix: brightness, contrast, saturation and gray, with Pillow's roundings.

For a pixel x (red, green, blue; 0 to 255) and Rec. 601's weights w = (0.299, 0.587, 0.114):

    brightness b:  x' = b x
    contrast c:    x' = c x + (1 - c) m,     m = w . (mean of all x), rounded, the image's mean gray
    saturation s:  x' = s x + (1 - s) w . x
    gray:          x' = w . x

Each change is an affine map A x + t, so a sequence of changes is one 3 x 4 matrix: A2 (A1 x + t1) + t2. The mean of all
x follows the same maps, so contrast needs no pass over the pixels at any position in the order. Pillow clips to 0 to
255 after each change and truncates. A change by a factor of at most 1 cannot leave the range (x' is between x and
another value of the range), so it can be folded exactly; after a factor above 1, pixels are clipped first. Truncation
subtracts 1/2 on average, and so does t: there is no bias.

Hue is no such map: Pillow shifts the hue of HSV, which keeps the largest and the smallest of the three channels. The
closest matrix, a rotation of the color space around gray, differs from Pillow by 4 of 255 on average at a shift of 0.1
of the circle, and a rotation of YIQ by 6. So hue is shifted in 8-bit HSV here too, between two matrices.
"""

from __future__ import annotations

import cv2
import numpy as np

WEIGHTS = np.array([0.299, 0.587, 0.114])
_NO_CHANGE = np.eye(3, 4)
_DROPPED = -0.5  # makes rounding truncate on average


class Colors:
    """An image with a pending change of color.

    Args:
        pixels: (H, W, 3) uint8, C-contiguous. Not modified.
    """

    def __init__(self, pixels: np.ndarray):
        self._pixels = pixels
        self._matrix: np.ndarray | None = None  # (3, 4): A and t
        self._may_leave = False

    @property
    def pixels(self) -> np.ndarray:
        """The image with all changes applied."""
        if self._matrix is not None:
            # cv2.transform rounds and clips to 8 bits; the offset in the matrix turns rounding into truncation.
            self._pixels = cv2.transform(self._pixels, self._matrix.astype(np.float32))
            self._matrix, self._may_leave = None, False
        return self._pixels

    def brighten(self, factor: float) -> None:
        """Multiply all values."""
        self._change(factor * self._pending(), _DROPPED, factor > 1)

    def stretch(self, factor: float) -> None:
        """Change the contrast."""
        matrix = self._pending()
        mean = int(WEIGHTS @ matrix @ (*cv2.mean(self._pixels)[:3], 1.0) + 0.5)
        self._change(factor * matrix, (1 - factor) * mean + _DROPPED, factor > 1)

    def saturate(self, factor: float) -> None:
        """Change the saturation."""
        matrix = self._pending()
        self._change(factor * matrix + (1 - factor) * (WEIGHTS @ matrix), _DROPPED, factor > 1)

    def gray(self) -> None:
        """Set all channels to the gray value, which Pillow rounds."""
        matrix = self._pending()
        self._change(np.tile(WEIGHTS @ matrix, (3, 1)), 0.0, False)

    def turn_hue(self, shift: float) -> None:
        """Shift the hue by a part of the circle, -0.5 to 0.5."""
        if not (steps := int(shift * 255) % 256):
            return
        hsv = cv2.cvtColor(self.pixels, cv2.COLOR_RGB2HSV_FULL)
        height, width, _ = hsv.shape
        step = np.zeros((width, 3), np.uint8)
        step[:, 0] = steps
        rows = hsv.reshape(height, width * 3)
        np.add(rows, step.reshape(1, -1), out=rows)  # uint8 wraps around, as hue does
        self._pixels = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)

    def mirror(self) -> None:
        """Swap left and right."""
        self._pixels = cv2.flip(self._pixels, 1)

    def _pending(self) -> np.ndarray:
        """Return the matrix of the pending changes, after clipping pixels that may have left the range."""
        if self._may_leave:
            # Reading the pixels applies and clips what is pending.
            _ = self.pixels
        return _NO_CHANGE if self._matrix is None else self._matrix

    def _change(self, matrix: np.ndarray, offset: float, may_leave: bool) -> None:
        matrix[:, 3] += offset
        self._matrix, self._may_leave = matrix, may_leave
