"""Decoding of untrusted images and arrays: damaged, oversized or malicious files are refused."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageColor, ImageOps

from vissl_zero.atomic import open_regular, read_regular
from vissl_zero.config.blocks.data import Data
from vissl_zero.data.dicom import dicom_image, is_dicom, require_pydicom
from vissl_zero.errors import DataError
from vissl_zero.resolve.image_files import EXTENSIONS

# Pillow's own MAX_IMAGE_PIXELS: a quarter of a GiB as 24-bit pixels. Pillow only warns; here such files are refused,
# because training decodes them in every epoch, in several workers at once.
MAX_PIXELS = 89_478_485

# An allow-list, so that no file reaches a decoder that starts another program (EPS runs Ghostscript) or is rarely used.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MAX_FILE_BYTES = 2**30
MAX_SCANS, MAX_SCANNED = 50, 2 * 10**9  # an encoder writes about 10 scans; 2e9 pixels take a core 5 to 20 s
_GZIP, _JPEG, _PNG, _START_OF_SCAN = b"\x1f\x8b", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"\xff\xda"
_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
PNG_BITS = 24  # offset of a PNG's bits per sample; the next byte is the color type
_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


class BrokenImageError(DataError):
    """One image cannot be used; ``reason`` is a clause without the file name."""

    def __init__(self, name: str, reason: str):
        self.name = name
        self.reason = reason
        super().__init__(
            f"The image {name} cannot be used: {reason}. "
            "Delete or repair the file, or set config.DATA.ON_BROKEN_IMAGE=skip: the next image takes its place, "
            "and embed leaves it out."
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        # Workers send it pickled; the default would call the class with the message alone.
        return BrokenImageError, (self.name, self.reason)


@dataclass(frozen=True)
class Decoder:
    """Decodes image files in memory; the keys ``DATA.EXIF``, ``DATA.BACKGROUND`` and ``DATA.MAX_PIXELS``.

    Attributes:
        applies_exif: rotate an image by its EXIF orientation.
        background: red, green and blue behind transparent pixels; None: the stored color of these pixels.
        max_pixels: largest number of pixels of an image.
        channels: channels of an image; other than 3: see ``data/channels.py``.
    """

    applies_exif: bool = False
    background: tuple[int, int, int] | None = None
    max_pixels: int = MAX_PIXELS
    channels: int = 3

    @property
    def endings(self) -> tuple[str, ...]:
        """File name endings of images."""
        return endings_of(self.channels)

    @staticmethod
    def of(data_cfg: Data) -> Decoder:
        """Return the decoder of a DATA block."""
        background = None if data_cfg.BACKGROUND == "stored" else ImageColor.getrgb(data_cfg.BACKGROUND)[:3]
        return Decoder(data_cfg.EXIF == "apply", background, data_cfg.MAX_PIXELS, data_cfg.IN_CHANNELS)

    def image(self, data: bytes, name: str | Path, look: Callable[[Image.Image], object] | None = None) -> Image.Image:
        """Decode a file to 8-bit RGB.

        Args:
            data: content of the file.
            name: name of the image, for errors.
            look: receives the opened Pillow image, with its format and mode, after its pixels have been read.
        Raises:
            BrokenImageError: the file is damaged, truncated, not an image, has more than ``max_pixels`` pixels, is too
                slow to decode, or has pixels of an unknown range (floating point, 32-bit integers, 12-bit TIFF).
        """
        if is_dicom(data):
            require_pydicom()
        with named(name), _limit_of(self.max_pixels):
            if is_dicom(data):
                decoded = dicom_image(data, lambda width, height: self.check(width, height, data, name))
                decoded.format = "DICOM"
                if look is not None:
                    look(decoded)
                return decoded.convert("RGB")
            if data[:2] == _GZIP:
                raise BrokenImageError(str(name), "it is compressed with gzip (unpack it with gunzip)")
            try:
                return self._decoded(data, name, look)
            except ValueError:
                # Pillow limits the size of texts and color profiles in a PNG. The pixels need neither.
                if data[:8] != _PNG:
                    raise
                return self._decoded(_without_texts(data), name, look)

    def _decoded(self, data: bytes, name: str | Path, look: Callable[[Image.Image], object] | None) -> Image.Image:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            self.check(*image.size, data, name)
            turned = ImageOps.exif_transpose(image) if self.applies_exif else image
            opaque = turned if self.background is None else _on(self.background, turned)
            shown = _as_8_bits(opaque, image, name)
            if shown.mode == "P" and isinstance(shown.info.get("transparency"), bytes):
                shown = shown.convert("RGBA")  # the same colors; Pillow warns of the direct way
            rgb = shown.convert("RGB")
            if look is not None:
                look(image)
            return rgb

    def mask(self, data: bytes, name: str | Path) -> np.ndarray:
        """Decode a PNG whose pixels are classes: palette indices or gray values as stored, or colors.

        Args:
            data: content of the file.
            name: name of the mask, for errors.
        Returns:
            (H, W) uint8 of a palette or of gray, or (H, W, 3) uint8.
        Raises:
            BrokenImageError: the file is no PNG, is damaged, or has more than 8 bits per sample.
        """
        if data[:8] != _PNG:
            raise BrokenImageError(str(name), "it is no PNG, and other formats change the classes of a mask")
        with named(name), _limit_of(self.max_pixels), Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            self.check(*image.size, data, name)
            bits, color = data[PNG_BITS], data[PNG_BITS + 1]
            if bits > 8:
                raise BrokenImageError(str(name), f"its pixels have {bits} bits; a mask has at most 8")
            values = np.asarray(image, dtype=np.uint8)
            # Pillow scales gray of 2 and 4 bits to 0 to 255; classes are the stored values.
            values = values // (255 // (2**bits - 1)) if color == 0 and 1 < bits < 8 else values
        return values if values.ndim == 2 else values[..., 0] if values.shape[2] == 2 else values[..., :3]

    def size(self, data: bytes, name: str | Path) -> tuple[int, int]:
        """Read width and height of the decoded image. Raises BrokenImageError."""
        if is_dicom(data):
            return self.image(data, name).size
        with named(name), _limit_of(self.max_pixels), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            is_turned = self.applies_exif and image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE
            return (image.height, image.width) if is_turned else (image.width, image.height)

    def check(self, width: int, height: int, data: bytes, name: str | Path) -> None:
        """Refuse an image that needs too much memory or time, before any pixel is decoded.

        Raises:
            BrokenImageError: too many pixels, or too many scans of a progressive JPEG.
        """
        if width * height > self.max_pixels:
            raise BrokenImageError(
                str(name),
                f"its {width} x {height} pixels are more than the {self.max_pixels:,} that are read (oversized; "
                "config.DATA.MAX_PIXELS is the limit)",
            )
        # Each scan passes over all pixels, and may be a few bytes long. The limit is of work, not of time, so that all
        # machines refuse the same files.
        scans = data.count(_START_OF_SCAN) if data[:2] == _JPEG else 0
        if scans > MAX_SCANS and scans * width * height > MAX_SCANNED:
            work = f"its {scans:,} scans of {width} x {height} pixels take too long to decode"
            raise BrokenImageError(str(name), work)


def endings_of(channels: int) -> tuple[str, ...]:
    """Return the file name endings of images with ``channels`` channels; other than 3, arrays (.npy) too."""
    return EXTENSIONS if channels == 3 else (*EXTENSIONS, ".npy")


def read_file(path: str | Path) -> bytes:
    """Read an image file.

    Raises:
        BrokenImageError: the file is missing, not regular, unreadable, or larger than ``_MAX_FILE_BYTES``.
    """
    with named(path):
        return read_regular(path, _MAX_FILE_BYTES, follow_links=True)  # a pipe would block for ever


def read_image(path: str | Path) -> Image.Image:
    """Read and decode the image at ``path`` with the default ``Decoder``."""
    return Decoder().image(read_file(path), path)


def decode_image(data: bytes, name: str) -> Image.Image:
    """Decode an image file in memory with the default ``Decoder``; ``name`` is its name in errors."""
    return Decoder().image(data, name)


@contextmanager
def named(name: str | Path) -> Iterator[None]:
    """Convert any exception to a BrokenImageError with the name of this image. A context manager."""
    try:
        with warnings.catch_warnings():
            # The size check below refuses what Pillow warns about. Costs 5 microseconds.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except BrokenImageError:
        raise
    except Exception as error:
        raise BrokenImageError(str(name), _reason(error)) from error


@contextmanager
def _limit_of(max_pixels: int) -> Iterator[None]:
    """Raise Pillow's own limit, of which it refuses the double, if more pixels are allowed. A context manager."""
    before = Image.MAX_IMAGE_PIXELS
    # Only raised, never lowered: ``check`` refuses smaller sizes with a message of its own.
    if before is not None and max_pixels > before:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _without_texts(data: bytes) -> bytes:
    """Copy a PNG without texts and color profile."""
    kept, at = [data[:8]], 8
    while at + 8 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")  # length, kind, content, checksum
        if data[at + 4 : at + 8] not in _TEXTS:
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def _on(background: tuple[int, int, int], image: Image.Image) -> Image.Image:
    """Composite an image that has transparent pixels onto a background; return others unchanged."""
    if "transparency" not in image.info and image.mode not in ("RGBA", "LA", "PA", "La", "RGBa"):
        return image
    if image.mode.startswith("I"):
        return image  # a PNG of 16-bit gray with one transparent value: RGBA has 8 bits
    whole = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", whole.size, (*background, 255)), whole)


def read_array(path: str | Path, max_dims: int = 1) -> np.ndarray:
    """Read the array of a ``.npy`` file, of 1 to ``max_dims`` dimensions. Nothing is unpickled.

    Raises:
        ValueError: the file is missing or damaged, or has another array; the text says which.
    """
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # NumPy refuses pickles by default, so the file runs no code.
            values = np.load(file)
    except Exception as error:  # numpy raises many kinds: TokenError, BadZipFile, MemoryError, OverflowError
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    # Items of no bytes: a file of 100 bytes may have 2**62 of them.
    if not isinstance(values, np.ndarray) or not 1 <= values.ndim <= max_dims or values.dtype.itemsize == 0:
        raise ValueError("it has no 1-d array" if max_dims == 1 else "it has no 1-d or 2-d array")
    if values.dtype.kind == "U":
        codes = np.ascontiguousarray(values).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:  # numpy would make an invalid str of it
            raise ValueError("it has text that is damaged")
    return values


def _as_8_bits(image: Image.Image, file: Image.Image, path: str | Path) -> Image.Image:
    """Convert gray of 16 bits to 8 bits, 65,535 to 255; return images of 8 bits unchanged.

    Args:
        image: the image to convert.
        file: the image as opened, with its format and tags.
        path: name for errors.
    Raises:
        BrokenImageError: the range of the values is unknown.
    """
    # Pillow converts color of 16 bits itself, but its ``convert`` clips gray of 16 bits at 255.
    is_16_bits = image.mode == "I" and file.format in ("PPM", "PNG")  # PNG: before Pillow 10
    if image.mode.startswith("I;16") or is_16_bits:
        depths = _tag(file, ExifTags.Base.BitsPerSample)
        if _tag(file, ExifTags.Base.PhotometricInterpretation) == {0}:
            raise BrokenImageError(str(path), "its 16-bit gray is stored with 0 for white, which is not read")
        if depths <= {16}:
            gray = np.asarray(image).astype(np.uint32)
            # In integers, with the half added, so that every machine rounds alike.
            return Image.fromarray(((gray * 255 + 32_767) // 65_535).astype(np.uint8))
        raise BrokenImageError(str(path), f"its pixels have {max(depths)} bits; only 1, 8 and 16 are supported")
    if image.mode in ("I", "F"):
        kind = "floating-point numbers" if image.mode == "F" else "32-bit integers"
        raise BrokenImageError(
            str(path), f"its pixels are {kind}, with an unknown white level (save it with 8 or 16 bits)"
        )
    return image


def _tag(image: Image.Image, number: int) -> set[int]:
    """Return the values of a TIFF tag; empty for other formats."""
    tags = getattr(image, "tag_v2", None)
    value = tags.get(number, ()) if tags is not None else ()
    return set(value) if isinstance(value, tuple) else {value}


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is not an image in one of the formats {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        pixels = re.search(r"\((\d+) pixels\)", str(error))
        size = f"its {int(pixels.group(1)):,} pixels are" if pixels else "it is"
        return f"{size} more than the {MAX_PIXELS:,} that are read (it could be a decompression bomb)"
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[0].lower()}{text[1:]}".rstrip(".")
