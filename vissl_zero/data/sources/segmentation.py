"""Images with masks in a folder (``segmentation_folder``): ``images/`` and ``masks/``, files of the same names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from vissl_zero.config.constraints import number
from vissl_zero.data.decode import BrokenImageError, Decoder, read_file
from vissl_zero.data.source import EncodedSource, SourceRequest
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES
from vissl_zero.resolve.pairs import IGNORED, SOURCE, list_pairs, listed, names_of_classes


@dataclass
class SegmentationFolderConfig:
    """``segmentation_folder``: ``images/`` and ``masks/``."""

    num_classes: int = number(0, least=0, most=IGNORED)
    """Classes of pixels, numbered from 0 in the masks; 0: as many as ``classes.txt`` names. TEST has TRAIN's."""


@DATA_SOURCES.register(SOURCE, config=SegmentationFolderConfig)
class SegmentationFolder(EncodedSource):
    """Images and masks: images/ and masks/ of a folder.

    A mask is a PNG of classes, by palette or gray, or of the colors of PASCAL VOC; 255, or VOC's border color, does not
    count. ``classes.txt`` names the classes, one a line. Several folders are joined, in the order of DATA_PATHS.

    Args:
        request: request of the source.
        num_classes: see ``SegmentationFolderConfig``.
    Raises:
        DataError: a folder or a mask is missing, or the number of classes is.
    Cost: lists the folders; no file is read.
    """

    def __init__(self, request: SourceRequest, num_classes: int = 0):
        super().__init__(request.decoder)
        key = request.key
        if not request.paths:
            raise DataError(f"{SOURCE} needs a folder with images/ and masks/: set {key}=[<folder>].")
        lists = [list_pairs(Path(path)) for path in request.paths]
        if problems := [clause for _, clauses in lists for clause in clauses]:
            raise DataError(f"{key} must hold a mask for each image, and {listed(problems)}.")
        names = [names_of_classes(Path(path), num_classes) for path in request.paths]
        self.class_names: tuple[str, ...] = tuple(request.class_names) or next(filter(None, names), ())
        if not self.class_names:
            raise DataError(
                f"config.DATA.{request.split}.SOURCE_PARAMS.num_classes must say how many classes there are."
            )
        pairs = [pair for pairs, _ in lists for pair in pairs]
        # Fixed-width bytes, not a list of str: a copy goes to every loader worker.
        self._images = np.array([os.fsencode(pair.image) for pair in pairs])
        self._masks = np.array([os.fsencode(pair.mask) for pair in pairs])

    def __len__(self) -> int:
        return len(self._images)

    def encoded(self, index: int) -> bytes:
        """Read the file of an image. Raises BrokenImageError."""
        return read_file(self.name(index))

    def mask(self, index: int) -> Image.Image:
        """Read the class of each pixel, 255 where ignored. Raises BrokenImageError."""
        name = os.fsdecode(self._masks[index])
        return Image.fromarray(read_mask(self.decoder, name, len(self.class_names)))

    def check(self, index: int) -> None:
        """Check that a mask can be decoded, and has the size of its image. Raises BrokenImageError."""
        name, data = self.name(index), self.encoded(index)
        size, mask = self.decoder.size(data, name), self.mask(index).size
        if size != mask:
            raise BrokenImageError(name, different_sizes(size, mask))

    def label(self, index: int) -> int | None:
        """Return None: pixels have classes, images have none."""
        return None

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return os.fsdecode(self._images[index])


def different_sizes(image: tuple[int, int], mask: tuple[int, int]) -> str:
    """Return a clause for errors: image and mask have different sizes."""
    sizes = " and ".join(f"{width} x {height}" for width, height in (image, mask))
    return f"image and mask have different sizes, {sizes} pixels"


def read_mask(decoder: Decoder, path: str, num_classes: int) -> np.ndarray:
    """Read a mask.

    Args:
        decoder: decoder with limits.
        path: path of a PNG.
        num_classes: number of classes.
    Returns:
        (H, W) uint8, each below ``num_classes`` or ``IGNORED``.
    Raises:
        BrokenImageError: the mask cannot be decoded, or has a pixel of another class.
    """
    values = decoder.mask(read_file(path), path)
    if values.ndim == 3:
        values = _classes_of(values, path)
    counts = np.bincount(values.ravel(), minlength=IGNORED + 1)[num_classes:IGNORED]
    if counts.any():
        largest = num_classes + int(np.flatnonzero(counts)[-1])
        raise BrokenImageError(path, f"it has class {largest}, and classes end at {num_classes - 1}, but for {IGNORED}")
    return values


def _classes_of(colors: np.ndarray, path: str) -> np.ndarray:
    """Convert VOC's colors (H, W, 3) to classes (H, W)."""
    codes = _codes(colors)
    known = _codes(voc_colors())
    order = known.argsort()
    # Clipped, because a color after the last known one has no place. Each is compared below.
    places = order[np.searchsorted(known[order], codes).clip(max=IGNORED)]
    if (unknown := known[places] != codes).any():
        red, green, blue = colors[unknown][0].tolist()
        raise BrokenImageError(path, f"its color ({red}, {green}, {blue}) is no class of PASCAL VOC")
    return places.astype(np.uint8)


def _codes(colors: np.ndarray) -> np.ndarray:
    codes: np.ndarray = colors.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    return codes


@cache
def voc_colors() -> np.ndarray:
    """Compute PASCAL VOC's color of each class, (256, 3) uint8: the bits of the class, distributed over three channels.

    Follows VOClabelcolormap of the development kit (http://host.robots.ox.ac.uk/pascal/VOC/voc2012/).
    """
    classes = np.arange(IGNORED + 1)
    colors = np.zeros((len(classes), 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((classes >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors
