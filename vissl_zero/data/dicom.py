"""DICOM images (``pip install vissl-zero[dicom]``): values in the file's display range, in 8 bits."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from vissl_zero.errors import DataError

ENDING = ".dcm"
_PREFIX = slice(128, 132)


def is_dicom(data: bytes) -> bool:
    """Check whether a file has DICOM's prefix."""
    return data[_PREFIX] == b"DICM"


def require_pydicom() -> None:
    """Raise DataError, with the command that installs pydicom, if it is missing."""
    if find_spec("pydicom") is None:
        raise DataError("DICOM images need pydicom. Run pip install vissl-zero[dicom].")


def dicom_image(data: bytes, check: Callable[[int, int], None]) -> Image.Image:
    """Decode the first frame of a DICOM file; pydicom applies the modality LUT and the window (or VOI LUT).

    The range of the window or LUT becomes 0 to 255; without either, the range from the smallest to the largest value.
    Color keeps the upper 8 bits. MONOCHROME1 is inverted, so that white is always the largest value.

    Args:
        data: content of the file.
        check: receives width and height before pixels are decoded, and may raise.
    Returns:
        Gray or RGB, 8 bits.
    Raises:
        Exception: of any class, from pydicom: the file is damaged, has no pixels, or no plugin decodes them.
    """
    from pydicom import dcmread
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut, pixel_array

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about attributes that violate the standard
        dataset = dcmread(io.BytesIO(data))
        # From the header: a small file may ask for gigabytes of pixels.
        check(int(dataset.get("Columns", 0)), int(dataset.get("Rows", 0)))
        pixels = pixel_array(dataset, index=0)
        photometric = dataset.PhotometricInterpretation
        if photometric == "PALETTE COLOR":
            pixels = apply_color_lut(pixels, dataset)
            return _eight_bits(pixels, 0, np.iinfo(pixels.dtype).max)
        if pixels.ndim == 3:  # red, green, blue: pydicom converts YBR
            return _eight_bits(pixels, 0, 2**dataset.BitsStored - 1)
        values = apply_modality_lut(pixels, dataset)
        shown = apply_voi_lut(values, dataset)
        least: float
        most: float
        if sequence := dataset.get("VOILUTSequence"):
            least, most = 0, 2 ** sequence[0].LUTDescriptor[2] - 1
        elif dataset.get("WindowWidth") is not None:
            least, most = _range_of_window(dataset, apply_voi_lut)
        else:
            least, most = shown.min(), shown.max()
        # MONOCHROME1 shows the smallest value as white.
        return _eight_bits(-shown, -most, -least) if photometric == "MONOCHROME1" else _eight_bits(shown, least, most)


def _range_of_window(dataset: Any, apply_voi_lut: Callable[..., np.ndarray]) -> tuple[float, float]:
    """Return the window's output for the smallest and the largest inputs."""
    # A sigmoid window overflows in exp at these values, and its limit is right all the same.
    with np.errstate(over="ignore"):
        least, most = apply_voi_lut(np.array([-1e30, 1e30]), dataset)
    return float(least), float(most)


def _eight_bits(values: np.ndarray, least: float, most: float) -> Image.Image:
    spread = (values.astype(np.float64) - least) * (255 / max(most - least, 1e-12))
    return Image.fromarray(spread.round().clip(0, 255).astype(np.uint8))
