"""Mean and standard deviation of the pixels of a source, for ``Normalize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile

from vissl_zero.data.channels import read_channels
from vissl_zero.data.decode import PNG_BITS, BrokenImageError, Decoder
from vissl_zero.data.one_pass import looked_at
from vissl_zero.data.source import Source, encoded_image
from vissl_zero.errors import DataError

_CHANNELS = 3


@dataclass(frozen=True)
class Counted:
    """Sums over a chunk of images.

    Attributes:
        values: (3, 256) int64, histogram of each channel of the decoded RGB images.
        num_images: number of readable images.
        is_gray: whether all images are gray.
        bits: largest number of bits per channel of any image.
    """

    values: np.ndarray
    num_images: int
    is_gray: bool
    bits: int


def count(source: Source, indices: range) -> Counted:
    """Count the pixel values of these images; broken images are skipped."""
    values = np.zeros((_CHANNELS, 256), np.int64)
    num_images, is_gray, most_bits = 0, True, 1
    for index in indices:
        try:
            image, bits = _read(source, index)
        except BrokenImageError:
            continue
        counts = np.array(image.histogram(), np.int64).reshape(_CHANNELS, 256)
        values += counts
        num_images += 1
        most_bits = max(most_bits, bits)
        # Histograms first: equal pixels have equal histograms, and comparing pixels takes longer.
        if is_gray and not ((counts == counts[0]).all() and _is_gray(image)):
            is_gray = False
    return Counted(values, num_images, is_gray, most_bits)


def _read(source: Source, index: int) -> tuple[Image.Image, int]:
    """Decode an image, and return it with its bits per channel."""
    data = encoded_image(source, index)
    if not isinstance(data, bytes):
        return data, 8
    depths: list[int] = []
    image = Decoder().image(data, source.name(index), lambda file: depths.append(_bits(file, data)))
    return image, depths[-1]


def _is_gray(image: Image.Image) -> bool:
    red, green, blue = (channel.tobytes() for channel in image.split())
    return red == green == blue


def _bits(file: Image.Image, data: bytes) -> int:
    """Return the bits per channel in the file; Pillow reads color of 16 bits as 8 without a trace."""
    if file.format == "PNG":
        return data[PNG_BITS]
    if isinstance(file, TiffImageFile):
        return max(file.tag_v2.get(ExifTags.Base.BitsPerSample, (1,)))
    return 1 if file.mode == "1" else 16 if file.mode.startswith("I") else 8


@dataclass(frozen=True)
class _Sums:
    """Sums over a chunk of images of other channels than red, green and blue, in float64.

    Attributes:
        num_images: number of readable images.
        num_pixels: number of pixels of these images.
        of_values, of_squares: (C,), sums over all pixels of each channel.
    """

    num_images: int
    num_pixels: int
    of_values: np.ndarray
    of_squares: np.ndarray


def _sum_up(source: Source, indices: range, channels: int) -> _Sums:
    """Sum the values of these images; broken images are skipped."""
    num_images = num_pixels = 0
    of_values, of_squares = np.zeros(channels), np.zeros(channels)
    for index in indices:
        try:
            image = read_channels(source, index, Decoder(channels=channels)).double().flatten(1)
        except BrokenImageError:
            continue
        num_images, num_pixels = num_images + 1, num_pixels + image.shape[1]
        of_values += image.sum(1).numpy()
        of_squares += image.square().sum(1).numpy()
    return _Sums(num_images, num_pixels, of_values, of_squares)


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of all pixels in the loader's range, where 255, or 65,535 of 16 bits, is 1.

    Attributes:
        num_images: number of readable images.
        num_broken: number of broken images.
        channels: number of channels; 1 if all images are RGB and gray.
        mean, std: mean and standard deviation of each channel, over all pixels of all images.
    """

    num_images: int
    num_broken: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize(self) -> str:
        """Return the entry for TRANSFORMS, a line of YAML."""
        means, deviations = (", ".join(f"{value:.4f}" for value in values) for values in (self.mean, self.std))
        return f"- {{name: Normalize, mean: [{means}], std: [{deviations}]}}"


@dataclass(frozen=True)
class Statistics(ChannelStatistics):
    """Statistics of images that are read as 8-bit RGB; ``mean`` and ``std`` have three channels, also of gray images.

    Attributes:
        bits: largest number of bits per channel of any image.
    """

    bits: int


def statistics(source: Source, report: Callable[[str], None]) -> Statistics:
    """Measure all pixels of a source in one pass; an image's weight is its number of pixels.

    Args:
        source: the images.
        report: receives a line of progress every few seconds.
    Raises:
        DataError: none of the images can be read.
    """
    # Counts are integers, so neither the order of chunks nor the number of processes changes the result.
    values = np.zeros((_CHANNELS, 256), np.int64)
    num_images, is_gray, bits = 0, True, 1
    for counted in looked_at(source, count, report):
        values += counted.values
        num_images += counted.num_images
        is_gray &= counted.is_gray
        bits = max(bits, counted.bits)
    if not num_images:
        raise DataError(f"No image can be read (of {len(source):,}). vissl-zero data check names the reasons.")
    levels = np.arange(256) / 255.0
    share = values / values.sum(1, keepdims=True)
    mean = share @ levels
    std = np.sqrt((share * (levels - mean[:, None]) ** 2).sum(1))
    broken = len(source) - num_images
    channels = 1 if is_gray else _CHANNELS
    return Statistics(num_images, broken, channels, tuple(mean.tolist()), tuple(std.tolist()), bits)


def channel_statistics(source: Source, channels: int, report: Callable[[str], None]) -> ChannelStatistics:
    """Measure all pixels of a source with other channels than RGB in one pass; see ``statistics``.

    Args:
        source: the images.
        channels: DATA.IN_CHANNELS.
        report: receives a line of progress every few seconds.
    Raises:
        DataError: none of the images can be read.
    """
    # Chunks arrive in order, so float sums do not depend on the number of processes.
    parts = list(looked_at(source, partial(_sum_up, channels=channels), report))
    num_images, num_pixels = (
        sum(values) for values in zip(*((p.num_images, p.num_pixels) for p in parts), strict=True)
    )
    if not num_images:
        raise DataError(f"No image of {channels} channels can be read (of {len(source):,}).")
    mean = sum(part.of_values for part in parts) / num_pixels
    # Rounding may make the variance of a constant channel slightly negative.
    std = np.sqrt(np.maximum(sum(part.of_squares for part in parts) / num_pixels - mean**2, 0))
    broken = len(source) - num_images
    return ChannelStatistics(num_images, broken, channels, tuple(mean.tolist()), tuple(std.tolist()))
