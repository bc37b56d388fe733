"""Image files in folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vissl_zero.data.decode import EXTENSIONS, read_image
from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError, did_you_mean
from vissl_zero.registry import DATA_SOURCES

UNLABELLED = -1


@DATA_SOURCES.register("disk_folder")
class DiskFolder:
    """Class folders, or one flat folder of unlabelled images.

    A path that holds only folders has a class per folder (images may lie deeper inside it); a path that holds image
    files itself is unlabelled, folders beneath it included. Several paths are joined; a class of the same name in two
    of them is one class. Hidden files and folders are passed over. Images come in the order of the paths, then of their
    names by code point, the same on every machine.
    """

    def __init__(self, request: SourceRequest):
        if not request.paths:
            raise DataError(
                f"disk_folder needs a folder: set config.DATA.{request.split}.DATA_PATHS=[<folder with images>]."
            )
        found = [list_images(Path(path), f"config.DATA.{request.split}.DATA_PATHS") for path in request.paths]
        is_labelled = all(name is not None for names in found for name, _ in names)
        classes = sorted({name for names in found for name, _ in names if name is not None}) if is_labelled else []
        if request.class_names and classes:
            _check_known(classes, request)
            classes = list(request.class_names)
        # A single folder beneath the path is a place, not a label, unless TRAIN says that it is a class.
        self.class_names: tuple[str, ...] = tuple(classes) if len(classes) > 1 else ()
        number = {name: index for index, name in enumerate(self.class_names)}
        # Fixed-width bytes, not a list of str: a copy goes to every loader worker (ImageNet: 68 MB instead of 140 MB).
        self._files = np.array([os.fsencode(file) for names in found for _, file in names])
        self._labels = np.array([number.get(name or "", UNLABELLED) for names in found for name, _ in names])

    def __len__(self) -> int:
        return len(self._files)

    def image(self, index: int) -> Image.Image:
        """Read and decode the file. Raises BrokenImageError."""
        return read_image(self.name(index))

    def label(self, index: int) -> int | None:
        label = int(self._labels[index])
        return None if label == UNLABELLED else label

    def name(self, index: int) -> str:
        """The file's path."""
        return os.fsdecode(self._files[index])


def list_images(root: Path, key: str) -> list[tuple[str | None, str]]:
    """Class name (None without labels) and path of every image beneath ``root``, sorted.

    Args:
        root: a folder with class folders, or with images.
        key: the configuration key that named it, for messages.
    Raises:
        DataError: ``root`` is missing, is not a folder, cannot be read or holds no image.
    """
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else f"does not exist{_nearest(root)}"
        raise DataError(f"The data path {root} {what}. Correct {key}.")
    try:
        entries = sorted(_visible(root), key=lambda entry: entry.name)
        flat = any(_is_image(entry) for entry in entries)
        found: list[tuple[str | None, str]] = [
            (None if flat else entry.name, file) for entry in entries for file in _beneath(entry)
        ]
    except OSError as error:
        raise DataError(
            f"The data path {error.filename or root} cannot be listed: {error.strerror}. Correct {key}."
        ) from error
    if not found:
        raise DataError(_nothing_in(root, key))
    return found


def _visible(folder: os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _is_image(entry: os.DirEntry[str]) -> bool:
    # is_file: a named pipe called x.jpg would block the reader for ever.
    return entry.name.lower().endswith(EXTENSIONS) and entry.is_file()


def _beneath(entry: os.DirEntry[str], depth: int = 0) -> Iterator[str]:
    """Paths of the images at or below ``entry``, sorted."""
    if depth > 32:
        raise OSError(40, "more than 32 folders deep (a link that points to a folder above it?)", entry.path)
    if _is_image(entry):
        yield entry.path
    elif entry.is_dir():
        for child in sorted(_visible(entry), key=lambda child: child.name):
            yield from _beneath(child, depth + 1)


def _check_known(classes: list[str], request: SourceRequest) -> None:
    unknown = [name for name in classes if name not in request.class_names]
    if unknown:
        raise DataError(
            f"config.DATA.{request.split}.DATA_PATHS has class folders that DATA.TRAIN does not have: "
            f"{', '.join(unknown[:10])}.{did_you_mean(unknown[0], request.class_names)} "
            "Use the same folder names in both."
        )


def _nearest(path: Path) -> str:
    """The part of a missing path that does exist, to show where it goes wrong."""
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    return f" ({parent} does)" if parent else ""


def _nothing_in(root: Path, key: str) -> str:
    others = Counter(Path(name).suffix.lower() for _, _, names in os.walk(root) for name in names)
    others.pop("", None)
    seen = f" It does hold {', '.join(f'{n} {s}' for s, n in others.most_common(3))} files." if others else ""
    return f"The data path {root} holds no image files ({', '.join(EXTENSIONS)}).{seen} Correct {key}."
