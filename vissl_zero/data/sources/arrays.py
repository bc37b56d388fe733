"""Pixels in an array on disk (``npy``), mapped into memory and never read as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES


@DATA_SOURCES.register("npy")
class NpyArrays:
    """``.npy`` files of pixels: uint8 of (N, H, W), gray, or (N, H, W, C) with 1 or 3 channels.

    Under another DATA.IN_CHANNELS: (N, H, W), (N, H, W, C) or (N, C, H, W) of uint8, uint16 or floating point.

    Several files are joined, in the order of DATA_PATHS. Labels come from LABEL_SOURCES: [disk_filelist] and
    LABEL_PATHS. Workers share the memory of one file.

    Raises:
        DataError: a file is missing, is no such array, or is empty.
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, request: SourceRequest):
        key = request.key
        if not request.paths:
            raise DataError(f"npy needs arrays of images: set {key}=[<images.npy>].")
        self._paths = tuple(request.paths)
        self._is_rgb = request.decoder.channels == 3
        self._arrays = [_mapped(path, key, self._is_rgb) for path in self._paths]
        self._starts = np.cumsum([0, *map(len, self._arrays)])

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_arrays": []}  # a mapped array would be pickled with its content

    def __len__(self) -> int:
        return int(self._starts[-1])

    def image(self, index: int) -> Image.Image:
        """Read an RGB image. Raises BrokenImageError if the file has changed, or its values are no 8-bit colors."""
        pixels = self.array(index)
        if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (1,), (3,)):
            raise BrokenImageError(self.name(index), f"it is {pixels.dtype} of {pixels.shape}, and no picture")
        return rgb_image(pixels)

    def array(self, index: int) -> np.ndarray:
        """Copy the values of an image. Raises BrokenImageError if the file has changed."""
        at, row = self._place(index)
        try:
            if not self._arrays:
                self._arrays = [_mapped(path, "the path", self._is_rgb) for path in self._paths]
            return np.array(self._arrays[at][row])
        except (DataError, IndexError) as error:
            raise BrokenImageError(self.name(index), "its file has changed since the start") from error

    def label(self, index: int) -> int | None:
        """Return None: LABEL_PATHS has the labels."""
        return None

    def name(self, index: int) -> str:
        """Return the file's path, and the row."""
        at, row = self._place(index)
        return f"{self._paths[at]} row {row}"

    def _place(self, index: int) -> tuple[int, int]:
        at = int(np.searchsorted(self._starts, index, "right")) - 1
        return at, index - int(self._starts[at])


def rgb_image(pixels: np.ndarray) -> Image.Image:
    """Make an RGB image of uint8 pixels (H, W), (H, W, 1) or (H, W, 3)."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).convert("RGB")


def check_pixels(dtype: np.dtype[Any], shape: tuple[int, ...], name: str, fix: str = "Convert it.") -> None:
    """Check that ``rgb_image`` can convert the images of an array. Raises DataError, which ends in ``fix``."""
    if dtype != np.uint8 or len(shape) not in (3, 4) or shape[3:] not in ((), (1,), (3,)):
        must = "uint8 of (N, H, W) or (N, H, W, C) with 1 or 3 channels"
        raise DataError(f"{name} must hold images as {must}, not {dtype} of {shape}. {fix}")
    if 0 in shape:
        raise DataError(f"{name} is empty: its shape is {shape}.")


def _mapped(path: str, key: str, is_rgb: bool) -> np.ndarray:
    if not Path(path).is_file():  # a pipe would block for ever
        raise DataError(f"The array of images {path} is not a file. Correct {key}.")
    try:
        array = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy's parsers let much through
        reason = " ".join(str(error).split())
        raise DataError(f"The array of images {path} cannot be read ({reason}). Write it with numpy.save.") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive of arrays. Name a .npy file with one array.")
    if is_rgb:
        fix = "Convert it, or write config.DATA.IN_CHANNELS=<number> for another number of channels than 3."
        check_pixels(array.dtype, array.shape, path, fix)
    elif array.ndim not in (3, 4) or 0 in array.shape:
        must = "(N, H, W), (N, H, W, C) or (N, C, H, W)"
        raise DataError(f"{path} must hold images as {must}, not {array.shape}. Convert it.")
    return array
