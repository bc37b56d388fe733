"""Image files named by a list: VISSL's ``disk_filelist``."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image

from vissl_zero.data.decode import read_array, read_image
from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES


@DATA_SOURCES.register("disk_filelist")
class DiskFilelist:
    """Image files listed in a ``.npy`` array of paths or in a text file, one path a line.

    Several lists are joined, in the order of DATA_PATHS. A path that starts with REMOVE_IMG_PATH_PREFIX gets
    NEW_IMG_PATH_PREFIX in its place, so that a list written on another machine can be used here; a relative path counts
    from the folder of its list. Labels come from LABEL_SOURCES: [disk_filelist] and LABEL_PATHS.

    Raises:
        DataError: a list is missing, is no list of paths, or is empty.
    Cost: reads the lists. No image is looked up before it is used: on a network disk that takes hours.
    """

    def __init__(self, request: SourceRequest):
        key = f"config.DATA.{request.split}.DATA_PATHS"
        if not request.paths:
            raise DataError(f"disk_filelist needs a list of images: set {key}=[<paths.npy>].")
        old, new = request.path_prefix
        paths = [
            os.fsencode(_moved(path, old, new, Path(list_file).absolute().parent))
            for list_file in request.paths
            for path in read_list(Path(list_file), key)
        ]
        self.class_names: tuple[str, ...] = ()
        # Fixed-width bytes, not a list of str: a copy goes to every loader worker.
        self._files = np.array(paths)

    def __len__(self) -> int:
        return len(self._files)

    def image(self, index: int) -> Image.Image:
        """Read and decode the file. Raises BrokenImageError."""
        return read_image(self.name(index))

    def label(self, index: int) -> int | None:
        """None: a list of files has no labels."""
        return None

    def name(self, index: int) -> str:
        """The file's path."""
        return os.fsdecode(self._files[index])


def _moved(path: str, old: str, new: str, folder: Path) -> str:
    if old and path.startswith(old):
        path = new + path[len(old) :]
    return os.path.join(folder, path)  # noqa: PTH118 - millions of paths: pathlib takes 10 times as long


def read_list(path: Path, key: str) -> list[str]:
    """The paths of images that a list file holds.

    Args:
        path: a ``.npy`` file with a 1-d array of text, or a text file with a path a line (blank lines are passed over).
        key: the configuration key that named it, for messages.
    Raises:
        DataError: it is missing, is not such a file, or holds nothing.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"The list of images {path} is not a file. {key} of a disk_filelist names list files.")
    except OSError as error:
        raise DataError(f"The list of images {path} cannot be read: {error.strerror}. Correct {key}.") from error
    if path.suffix != ".npy":
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            fix = f"Correct {key}, or write it as text, one path a line."
            raise DataError(f"The list of images {path} is not text ({error}). {fix}") from error
        found = [line.strip() for line in lines if line.strip()]
    else:
        found = _read_array(path)
    if not found:
        raise DataError(f"The list of images {path} is empty. Correct {key}.")
    return found


def _read_array(path: Path) -> list[str]:
    try:
        values = read_array(path)
    except ValueError as error:
        # VISSL's own scripts write arrays of Python objects, which only unpickling could read: that runs code.
        fix = "Write it again with numpy.save(path, numpy.array(paths, dtype=str))."
        raise DataError(f"The list of images {path} is not a plain .npy array of text ({error}). {fix}") from error
    if values.dtype.kind not in "US":
        fix = "Write numpy.array(paths, dtype=str) with numpy.save."
        raise DataError(f"The list of images {path} must hold a 1-d array of text. {fix}")
    try:
        return [os.fsdecode(os.fsencode(value)) for value in values.tolist()]
    except ValueError as error:  # numbers that are no characters
        raise DataError(f"The list of images {path} has text that is damaged ({error}). Write it again.") from error
