"""Changes of color as one matrix: brightness, contrast, saturation and gray, with Pillow's roundings.

Of a pixel x (red, green, blue; 0 to 255) and Rec. 601's weights w = (0.299, 0.587, 0.114):

    brightness b:  x' = b x
    contrast c:    x' = c x + (1 - c) m,     m = w . (mean of all x), rounded, the image's mean gray
    saturation s:  x' = s x + (1 - s) w . x
    gray:          x' = w . x

Each is an affine map A x + t, so one after another they are one 3 x 4 matrix: A2 (A1 x + t1) + t2. The mean of all x
follows the same maps, so contrast needs no pass over the pixels at any place in the order. Pillow cuts to 0 to 255
after each change and drops the fraction. A change by a factor of at most 1 cannot leave the range (x' lies between x
and another value of the range), so whatever follows it folds exactly; after a factor above 1, pixels are cut first.
The dropped fraction is 1/2 on average, and t has it: this leaves no bias.

Hue is no such map: Pillow turns the hue of HSV, which keeps the largest and the smallest of the three channels. A
rotation of the color space around gray, the matrix that is closest to it, differs from it by 4 steps of 8 bits on
average at a shift of 0.1 of the circle, and a rotation of YIQ by 6. So hue is done in HSV of 8 bits here too, between
two matrices.
"""

from __future__ import annotations

import cv2
import numpy as np

WEIGHTS = np.array([0.299, 0.587, 0.114])
_NO_CHANGE = np.eye(3, 4)
_DROPPED = -0.5  # the mean of a fraction that is dropped, where rounding would drop none


class Colors:
    """An image whose change of color is pending.

    Args:
        pixels: (H, W, 3) uint8, C-contiguous. Not written to.
    """

    def __init__(self, pixels: np.ndarray):
        self._pixels = pixels
        self._matrix: np.ndarray | None = None  # (3, 4): A and t
        self._may_leave = False

    @property
    def pixels(self) -> np.ndarray:
        """The image with all changes done."""
        if self._matrix is not None:
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
        np.add(rows, step.reshape(1, -1), out=rows)  # 255 + 1 is 0: the circle closes
        self._pixels = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)

    def mirror(self) -> None:
        """Swap left and right."""
        self._pixels = cv2.flip(self._pixels, 1)

    def _pending(self) -> np.ndarray:
        """Return the matrix of the changes so far; first cut what may have left the range."""
        if self._may_leave:
            _ = self.pixels
        return _NO_CHANGE if self._matrix is None else self._matrix

    def _change(self, matrix: np.ndarray, offset: float, may_leave: bool) -> None:
        matrix[:, 3] += offset
        self._matrix, self._may_leave = matrix, may_leave
