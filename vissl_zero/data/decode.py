"""Reading untrusted images and arrays: damaged, oversized or malicious ones are refused."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from vissl_zero.atomic import open_regular
from vissl_zero.errors import DataError

# What Pillow itself calls suspicious: a quarter of a GiB as 24-bit pixels. Pillow only warns there; here it is refused,
# because a training set decodes the file in every epoch, in several workers at once.
MAX_PIXELS = 89_478_485

# Named, so that no file reaches a decoder that starts another program (EPS runs Ghostscript) or is seldom looked after.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of TIFF


class BrokenImageError(DataError):
    """One image cannot be used; ``reason`` is a clause without the file name."""

    def __init__(self, name: str, reason: str):
        self.name = name
        self.reason = reason
        super().__init__(
            f"The image {name} cannot be used: {reason}. "
            "Delete or repair the file, or set config.DATA.ON_BROKEN_IMAGE=skip to use another image in its place."
        )


def read_image(path: str | Path) -> Image.Image:
    """The image at ``path`` as 8-bit RGB, wholly decoded.

    Raises:
        BrokenImageError: missing, damaged, truncated, not an image, more than ``MAX_PIXELS`` pixels, or of pixels whose
            range is not known (floating point, 32-bit integers, 12-bit TIFF).
    """
    with _named(path), os.fdopen(open_regular(path, follow_links=True), "rb") as file:  # a pipe would block for ever
        return _decoded(file, path)


def decode_image(data: bytes, name: str) -> Image.Image:
    """An image whose file is in memory, as from a database; ``name`` is what errors call it. Else as ``read_image``."""
    with _named(name):
        return _decoded(io.BytesIO(data), name)


@contextmanager
def _named(name: str | Path) -> Iterator[None]:
    """Turn any failure into an error that names this image."""
    try:
        with warnings.catch_warnings():
            # Pillow warns where we are about to refuse. Costs 5 microseconds.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except BrokenImageError:
        raise
    except Exception as error:
        raise BrokenImageError(str(name), _reason(error)) from error


def _decoded(file: BinaryIO, path: str | Path) -> Image.Image:
    with Image.open(file, formats=FORMATS) as image:
        _check_size(image, path)
        return _as_8_bits(image, path).convert("RGB")


def read_array(path: str | Path, max_dims: int = 1) -> np.ndarray:
    """The array of a ``.npy`` file, of one dimension or at most ``max_dims``. Nothing is unpickled.

    Raises:
        ValueError: missing, damaged, or another array; the text says which.
    """
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy's parsers let much through: TokenError, BadZipFile, MemoryError, OverflowError
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    # Items of no bytes: a file of 100 bytes may have 2**62 of them.
    if not isinstance(values, np.ndarray) or not 1 <= values.ndim <= max_dims or values.dtype.itemsize == 0:
        raise ValueError("it has no 1-d array" if max_dims == 1 else "it has no 1-d or 2-d array")
    if values.dtype.kind == "U":
        codes = np.ascontiguousarray(values).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:  # numpy would make a text of it that breaks Python
            raise ValueError("it has text that is damaged")
    return values


def _check_size(image: Image.Image, path: str | Path) -> None:
    """Look at the header's size before any pixel is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BrokenImageError(
            str(path), f"its {width} x {height} pixels are more than the {MAX_PIXELS:,} that are read (oversized)"
        )


def _as_8_bits(image: Image.Image, path: str | Path) -> Image.Image:
    """Grey of 16 bits as grey of 8, 65,535 as 255; Pillow's own ``convert`` would cut off all above 255.

    Pillow reads color of 16 bits as 8 by itself. The value range of a float or 32-bit image is unknown.
    """
    is_16_bits = image.mode == "I" and image.format in ("PPM", "PNG")  # PNG: before Pillow 10
    if image.mode.startswith("I;16") or is_16_bits:
        depths = _tag(image, _BITS_PER_SAMPLE)
        if _tag(image, _PHOTOMETRIC) == {0}:
            raise BrokenImageError(str(path), "its 16-bit grey is stored with 0 for white, which is not read")
        if depths <= {16}:
            grey = np.asarray(image).astype(np.uint32)
            return Image.fromarray(((grey * 255 + 32_767) // 65_535).astype(np.uint8))
        raise BrokenImageError(str(path), f"its pixels have {max(depths)} bits; only 1, 8 and 16 are supported")
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        kind = "floating-point numbers" if image.mode == "F" else "32-bit integers"
        raise BrokenImageError(
            str(path), f"its pixels are {kind}, with an unknown white level (save it with 8 or 16 bits)"
        )
    return image


def _tag(image: Image.Image, number: int) -> set[int]:
    """What a TIFF says; empty for other formats, which leave no choice."""
    tags = getattr(image, "tag_v2", None)
    found = tags.get(number, ()) if tags is not None else ()
    return set(found) if isinstance(found, tuple) else {found}


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is not an image in one of the formats {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        pixels = re.search(r"\((\d+) pixels\)", str(error))
        size = f"its {int(pixels.group(1)):,} pixels are" if pixels else "it is"
        return f"{size} more than the {MAX_PIXELS:,} that are read (it could be a decompression bomb)"
    if isinstance(error, FileNotFoundError):
        return "the file no longer exists"
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[0].lower()}{text[1:]}".rstrip(".")
