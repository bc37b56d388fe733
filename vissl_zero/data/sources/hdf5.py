"""Images in an HDF5 file (``hdf5``): pixels, or encoded files, beside their labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.source import UNLABELLED, SourceRequest
from vissl_zero.data.sources.arrays import check_pixels, rgb_image
from vissl_zero.data.sources.packed import Packed, missing, one_path
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES

_IMAGES, _LABELS = ("images", "image", "data", "x"), ("labels", "label", "targets", "y")
_NAMES = "class_names"  # an attribute of the labels


@DATA_SOURCES.register("hdf5")
class Hdf5(Packed):
    """An HDF5 file: ``images`` are pixels as ``npy`` has them, or a file an item; ``labels`` are integers, if any.

    ``images`` may be called image, data, or x as well, and ``labels`` label, targets, or y. A file is an array of uint8
    of its own length. The attribute ``class_names`` of the labels may name the classes. An image is read when it is
    used; a file with chunks of many images reads them all for each.
    """

    def __init__(self, request: SourceRequest):
        self._path = str(one_path(request, "an HDF5 file"))
        self._file: Any = None
        file = self._opened()
        self._images, labels = _first_of(file, _IMAGES), _first_of(file, _LABELS)
        if not self._images:
            raise DataError(f"{self._path} has none of {', '.join(_IMAGES)}; it has {', '.join(file) or 'nothing'}.")
        images = file[self._images]
        self._holds_files = images.ndim == 1 and _h5py().check_vlen_dtype(images.dtype) == np.uint8
        if not self._holds_files:
            check_pixels(images.dtype, images.shape, f"{self._path}: {self._images}")
        values = np.full(len(images), UNLABELLED)
        names: list[str] = []
        if labels:
            values = file[labels][()]
            names = [str(name) for name in file[labels].attrs.get(_NAMES, ())]
            if values.shape != (len(images),) or values.dtype.kind not in "iu":
                raise DataError(
                    f"{self._path}: {labels} must be {len(images):,} integers, as many as there are images."
                )
        super().__init__(request, values.astype(np.int64), names)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_file": None}  # each process opens the file itself

    def _opened(self) -> Any:
        if self._file is None:
            if not Path(self._path).is_file():  # a pipe would block for ever
                raise DataError(f"{self._path} is not a file. Name an HDF5 file.")
            try:
                self._file = _h5py().File(self._path, "r", locking=False)  # network disks may refuse locks
            except OSError as error:
                raise DataError(f"{self._path} cannot be read as an HDF5 file ({error}).") from error
        return self._file

    def encoded(self, index: int) -> bytes | Image.Image:
        """Read a file without decoding it; an image if the HDF5 file has pixels. Raises BrokenImageError."""
        try:
            item = self._opened()[self._images][index]
        except (OSError, KeyError, IndexError, ValueError, DataError) as error:
            raise BrokenImageError(self.name(index), f"it cannot be read ({error})") from error
        return item.tobytes() if self._holds_files else rgb_image(item)

    def name(self, index: int) -> str:
        """Return the file's path, and the row."""
        return f"{self._path} row {index}"


def _first_of(file: Any, names: tuple[str, ...]) -> str:
    """Return the first of ``names`` that is a data set of the file; empty if none is."""
    return next((name for name in names if hasattr(file.get(name), "shape")), "")


def _h5py() -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise missing("h5py", "hdf5") from error
    return h5py
