"""Labels from elsewhere: VISSL's ``LABEL_SOURCES: [disk_filelist]``, a ``.npy`` file of integers.

A class for each image, or a row of several labels for each, as VISSL writes those of VOC07.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vissl_zero.data.decode import read_array
from vissl_zero.errors import DataError

if TYPE_CHECKING:
    from vissl_zero.data.source import Source


@dataclass(frozen=True)
class Relabelled:
    """A source under labels from elsewhere."""

    source: Source
    labels: tuple[int, ...]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def image(self, index: int) -> Image.Image:
        return self.source.image(index)

    def label(self, index: int) -> int | None:
        return self.labels[index]

    def name(self, index: int) -> str:
        return self.source.name(index)


@dataclass(frozen=True, eq=False)
class MultiLabelled:
    """A source whose images have several labels each, so that none of them is its class.

    Attributes:
        source: the images.
        matrix: (N, C) int8: 1 where an image shows the class, 0 where not, -1 where it does not count.
    """

    source: Source
    matrix: np.ndarray
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.source)

    def image(self, index: int) -> Image.Image:
        return self.source.image(index)

    def label(self, index: int) -> int | None:
        return None

    def name(self, index: int) -> str:
        return self.source.name(index)


def relabel(source: Source, paths: tuple[str, ...], class_names: tuple[str, ...]) -> Relabelled | MultiLabelled:
    """``source`` under the labels of ``.npy`` files, one integer per image in the source's order.

    Args:
        source: the images.
        paths: LABEL_PATHS; several are read one after another, as several DATA_PATHS are.
        class_names: the classes of TRAIN when ``source`` is TEST, else empty. Classes are the distinct values in
            ascending order (VISSL's rule), so labels need not be contiguous.
    Raises:
        DataError: a file is missing, is not an array of integers, or the number of labels is not that of the images.
    """
    arrays = [_read(path) for path in paths]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise DataError(f"{', '.join(paths)} must all have as many labels per image. Correct LABEL_PATHS.")
    values = np.concatenate(arrays)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if len(values) != len(source):
        raise DataError(
            f"{', '.join(paths)} has {len(values)} labels for {len(source)} images. "
            "Write one label per image, in the sorted order of the image files."
        )
    if values.ndim == 2:
        if not np.isin(values, (-1, 0, 1)).all():
            raise DataError(f"{', '.join(paths)} has rows of labels: each must be 1, 0 or -1 (does not count).")
        return MultiLabelled(source, values.astype(np.int8))
    names = class_names or tuple(str(value) for value in sorted(set(values.tolist())))
    number = {name: index for index, name in enumerate(names)}
    unknown = sorted({str(value) for value in values.tolist()} - set(names))
    if unknown:
        raise DataError(f"{', '.join(paths)} has labels that DATA.TRAIN does not have: {', '.join(unknown[:10])}.")
    return Relabelled(source, tuple(number[str(value)] for value in values.tolist()), names)


def _read(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise DataError(f"The label file {path} does not exist. Correct LABEL_PATHS.")
    try:
        values = read_array(path, max_dims=2)
    except ValueError as error:
        raise DataError(f"The label file {path} is not a plain .npy array of integers ({error}).") from error
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"The label file {path} must hold integers, 1-d or a row per image; write it with numpy.save.")
    return values
