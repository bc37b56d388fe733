"""Reading image files that nobody has checked: damaged, oversized, or made to hurt."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from PIL import Image

from vissl_zero.errors import DataError

# What Pillow itself calls suspicious: a quarter of a GiB as 24-bit pixels. Pillow only warns there; here it is refused,
# because a training set decodes the file in every epoch, in several workers at once.
MAX_PIXELS = 89_478_485

# Named, so that no file reaches a decoder that starts another program (EPS runs Ghostscript) or is seldom looked after.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


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
        BrokenImageError: missing, damaged, truncated, not an image, or more than ``MAX_PIXELS`` pixels.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns where we are about to refuse. Costs 5 microseconds.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path, formats=FORMATS)
        with image:
            _check_size(image, path)
            return image.convert("RGB")
    except BrokenImageError:
        raise
    except Exception as error:
        raise BrokenImageError(str(path), _reason(error)) from error


def _check_size(image: Image.Image, path: str | Path) -> None:
    """Look at the header's size before any pixel is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BrokenImageError(
            str(path), f"its {width} x {height} pixels are more than the {MAX_PIXELS:,} that are read (oversized)"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is not an image in one of the formats {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        pixels = re.search(r"\((\d+) pixels\)", str(error))
        size = f"its {int(pixels.group(1)):,} pixels are" if pixels else "it is"
        return f"{size} more than the {MAX_PIXELS:,} that are read (it could be a decompression bomb)"
    if isinstance(error, FileNotFoundError):
        return "the file is not there any more"
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[0].lower()}{text[1:]}".rstrip(".")
