"""An image before and after cropping: a file that is decoded once its crops are known, or 8-bit pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image

from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.color import Colors

_ALL = np.arange(256)
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
_EIGHTHS = (1, 2, 4, 8)  # factors by which libjpeg decodes smaller, from fewer DCT coefficients
_EXIF_ORIENTATION = b"Exif\0\0"


@dataclass(frozen=True)
class Cut:
    """A box of an image, resized.

    Attributes:
        top, left, height, width: the box, in pixels of the image.
        size: height and width of the result.
        mode: "bilinear" or "bicubic", both with Pillow's antialiasing.
    """

    top: int
    left: int
    height: int
    width: int
    size: tuple[int, int]
    mode: str = "bilinear"

    @property
    def shrinks_by(self) -> float:
        """The smaller of the two ratios, box over result."""
        return min(self.height / self.size[0], self.width / self.size[1])

    def of(self, pixels: np.ndarray, scale: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
        """Cut and resize in one pass.

        Args:
            pixels: (H, W, 3) uint8.
            scale: height and width of ``pixels`` over those of the image that the box refers to; box edges are rounded.
        """
        top, bottom = _edges(self.top, self.height, scale[0], pixels.shape[0])
        left, right = _edges(self.left, self.width, scale[1], pixels.shape[1])
        box = np.ascontiguousarray(pixels[top:bottom, left:right])  # torch then resizes it in channels-last format
        if box.shape[:2] == self.size:
            return box
        # torch's and not OpenCV's: all but one value in a thousand equal Pillow's.
        planes = torch.from_numpy(box).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(planes, self.size, mode=self.mode, antialias=True)
        return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _edges(start: int, length: int, scale: float, limit: int) -> tuple[int, int]:
    first = min(round(start * scale), limit - 1)
    return first, max(first + 1, min(round((start + length) * scale), limit))


class Picture:
    """Pixels with pending changes of color."""

    def __init__(self, pixels: np.ndarray):
        self.colors = Colors(pixels)

    @property
    def pixels(self) -> np.ndarray:
        """(H, W, 3) uint8, C-contiguous, with all changes applied."""
        return self.colors.pixels

    @pixels.setter
    def pixels(self, pixels: np.ndarray) -> None:
        self.colors = Colors(pixels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.colors._pixels.shape[:2]
        return height, width

    def cut(self, cuts: list[Cut]) -> list[Picture]:
        """Cut boxes out of the image."""
        return [Picture(cut.of(self.pixels)) for cut in cuts]

    def copy(self) -> Picture:
        """Copy the picture; changes of the copy do not affect this one."""
        # Pixels are shared: no change is made in place.
        return Picture(self.pixels)

    def opened(self) -> Picture:
        """Return this picture, which is decoded already."""
        return self

    def blur(self, kernel: np.ndarray) -> None:
        """Filter along columns and rows with ``kernel``, (2 r + 1,) float32; border pixels are replicated."""
        self.pixels = cv2.sepFilter2D(self.pixels, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)

    def solarize(self, threshold: float) -> None:
        """Invert values from a threshold up."""
        self.pixels = cv2.LUT(self.pixels, np.where(threshold > _ALL, _ALL, 255 - _ALL).astype(np.uint8))

    def posterize(self, bits: int) -> None:
        """Keep the upper bits of values."""
        self.pixels = cv2.LUT(self.pixels, (_ALL & ~(2 ** (8 - bits) - 1)).astype(np.uint8))

    def sharpen(self, share: float) -> None:
        """Blend: ``share`` of the image and 1 - ``share`` of a smoothed copy; above 1, edges get stronger."""
        smooth = self.pixels.copy()
        smooth[1:-1, 1:-1] = cv2.filter2D(self.pixels, -1, _SMOOTH)[1:-1, 1:-1]  # Pillow copies the border
        self.pixels = _blended(smooth, self.pixels, share)

    def spread(self) -> None:
        """Spread each channel over 0 to 255."""
        tables, pixels = [], self.pixels
        for least, most in zip(pixels.min((0, 1)).tolist(), pixels.max((0, 1)).tolist(), strict=True):
            scale = 255 / (most - least) if most > least else 1.0
            # Truncated, as Pillow's autocontrast computes its table. No pixel has the values below and above.
            tables.append((_ALL * scale - least * scale).astype(int) if most > least else _ALL)
        self.pixels = cv2.LUT(pixels, np.stack(tables, -1).astype(np.uint8)[:, None])

    def stroke(self, is_thicker: bool, share: float) -> None:
        """Blend the image with ``share`` of its 3 x 3 maximum (thicker) or minimum filter."""
        extreme = cv2.dilate if is_thicker else cv2.erode
        self.pixels = _blended(self.pixels, extreme(self.pixels, np.ones((3, 3), np.uint8)), share)


def _blended(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """Blend two images as Pillow does, which truncates."""
    mixed: np.ndarray = cv2.addWeighted(first, 1 - share, second, share, -0.5)
    return mixed


class EncodedPicture:
    """An image file. A JPEG is decoded once its boxes are known, at the smallest size that all of them allow.

    Pillow decodes any other file (another format or color space, damaged, rotated by EXIF), so that both backends read
    and refuse the same files.

    Args:
        data: content of the file.
        name: name of the image, for errors.
        decoder: decoder with limits, and for other files.
    Raises:
        BrokenImageError: the file cannot be decoded.
    """

    def __init__(self, data: bytes, name: str, decoder: Decoder):
        self._data, self._name, self._decoder = data, name, decoder
        self._opened: Picture | None = None
        self.size = self._header()

    def _header(self) -> tuple[int, int]:
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError:
            space = ""
        # simplejpeg does not rotate. A JPEG's EXIF is in its first segments, of at most 64 KiB each.
        is_turned = self._decoder.applies_exif and _EXIF_ORIENTATION in self._data[: 2**16]
        if space not in ("YCbCr", "Gray") or is_turned:
            return self._by_pillow().size
        self._decoder.check(width, height, self._data, self._name)
        return height, width

    def _by_pillow(self) -> Picture:
        if self._opened is None:
            self._opened = Picture(np.array(self._decoder.image(self._data, self._name)))
        return self._opened

    def opened(self) -> Picture:
        """Decode the whole image, once."""
        if self._opened is None:
            pixels = self._decoded(1)
            self._opened = self._by_pillow() if pixels is None else Picture(pixels)
        return self._opened

    def cut(self, cuts: list[Cut]) -> list[Picture]:
        """Cut boxes out of the image."""
        if self._opened is not None:
            return self._opened.cut(cuts)
        most = min(cut.shrinks_by for cut in cuts)
        # No box may have to be enlarged afterward: detail that was left out cannot come back.
        factor = max(factor for factor in _EIGHTHS if factor == 1 or factor <= most)
        pixels = self._decoded(factor)
        if pixels is None:
            return self._by_pillow().cut(cuts)
        scale = pixels.shape[0] / self.size[0], pixels.shape[1] / self.size[1]
        return [Picture(cut.of(pixels, scale)) for cut in cuts]

    def _decoded(self, factor: int) -> np.ndarray | None:
        """Decode a JPEG at 1 / factor of its size; None if simplejpeg fails and Pillow must try."""
        height, width = (-(-side // factor) for side in self.size)
        try:
            decoded: np.ndarray = simplejpeg.decode_jpeg(self._data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None
        return decoded


def opened(image: bytes | Image.Image, name: str | Path, decoder: Decoder) -> Picture | EncodedPicture:
    """Return the transforms' first input, for a file or for an image that its source made."""
    if isinstance(image, Image.Image):
        return Picture(np.array(image.convert("RGB")))
    return EncodedPicture(image, str(name), decoder)


class Finished:
    """A crop that is converted to floats by a lookup while it is written into a batch.

    Args:
        pixels: (H, W, 3) uint8.
        tables: for each channel (256,) float32, the float value of each uint8 value.
    """

    dtype = torch.float32

    def __init__(self, pixels: np.ndarray, tables: Sequence[np.ndarray]):
        self._pixels, self._tables = pixels, tables

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W)."""
        height, width, _ = self._pixels.shape
        return 3, height, width

    def write(self, row: np.ndarray) -> None:
        """Write the values into ``row``, (3, H, W) float32, contiguous."""
        for plane, table, target in zip(cv2.split(self._pixels), self._tables, row, strict=True):
            cv2.LUT(plane, table, target)
