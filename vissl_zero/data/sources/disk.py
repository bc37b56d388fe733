"""Image files on disk: in folders (``disk_folder``), or named by a list (VISSL's ``disk_filelist``)."""

from __future__ import annotations

import logging
import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vissl_zero.config.catalog import READ_FILES
from vissl_zero.data.decode import read_array, read_file
from vissl_zero.data.dicom import ENDING, require_pydicom
from vissl_zero.data.slow_work import SlowProgress
from vissl_zero.data.source import UNLABELLED, EncodedSource, SourceRequest
from vissl_zero.errors import DataError, did_you_mean, printable
from vissl_zero.registry import DATA_SOURCES
from vissl_zero.resolve.other_files import PICTURES, endings_in, held, left_out

_PER_PART = 2**16  # paths
logger = logging.getLogger(__name__)


class ListedFiles(EncodedSource):
    """Image files by path, with or without labels.

    Args:
        request: request of the source.
        files: (N,) paths, bytes.
        labels: (N,) class numbers, -1 without.
        class_names: class names by number; empty without labels.
    Attributes:
        left_out: sentences on what is not read.
    """

    left_out: Sequence[str] = ()

    def __init__(self, request: SourceRequest, files: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]):
        super().__init__(request.decoder)
        self.class_names = class_names
        self._files, self._labels = files, labels

    def __len__(self) -> int:
        return len(self._files)

    def encoded(self, index: int) -> bytes:
        """Read the file. Raises BrokenImageError."""
        return read_file(self.name(index))

    def label(self, index: int) -> int | None:
        label = int(self._labels[index])
        return None if label == UNLABELLED else label

    def name(self, index: int) -> str:
        """Return the file's path."""
        return os.fsdecode(self._files[index])


@DATA_SOURCES.register("disk_folder")
class DiskFolder(ListedFiles):
    """Class folders, or one flat folder of unlabeled images.

    A path that holds only folders has a class per folder (images may lie deeper inside it); a path that holds image
    files itself is unlabeled, folders beneath it included. Several paths are joined; a class of the same name in two
    of them is one class. Hidden files and folders are passed over. Images come in the order of the paths, then of their
    names by code point, the same on every machine.

    Attributes:
        left_out: sentences on what in the folders is not read: pictures of other formats, folders without images.
    """

    def __init__(self, request: SourceRequest):
        if not request.paths:
            raise DataError(f"disk_folder needs a folder: set {request.key}=[<folder with images>].")
        others, key = Counter[str](), request.key
        files, numbers = _Files(), dict[str | None, int]()  # class or None -> its number in order of appearance
        of_image = array("i")
        endings = request.decoder.endings
        for name, file in (
            image for path in request.paths for image in _images_below(Path(path), key, others, endings)
        ):
            files.add(file)
            of_image.append(numbers.setdefault(name, len(numbers)))
        # Sorted by name, not in the order of appearance, which depends on the order of the paths.
        classes = sorted(name for name in numbers if name is not None) if None not in numbers else []
        if request.class_names and classes:
            _check_known(classes, request)
            classes = list(request.class_names)
        # A single folder beneath the path is a location and not a class, unless TRAIN has this class.
        class_names = tuple(classes) if len(classes) > 1 else ()
        number = {name: index for index, name in enumerate(class_names)}
        paths = files.array()
        # Require it here, before training, and not at the first such image in a worker.
        if np.char.endswith(np.char.lower(paths), ENDING.encode()).any():
            require_pydicom()
        labels = np.array([number.get(name or "", UNLABELLED) for name in numbers])[np.array(of_image)]
        super().__init__(request, paths, labels, class_names)
        self.left_out = _left_out(request.paths, others, {*numbers})


class _Files:
    """Gathers paths as fixed-width bytes, in parts."""

    # Every loader worker gets a copy, and a list of a million strings would take 200 MiB.
    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._newest: list[bytes] = []

    def add(self, file: str) -> None:
        """Append a path."""
        self._newest.append(os.fsencode(file))
        if len(self._newest) == _PER_PART:
            self._parts.append(np.array(self._newest))
            self._newest = []

    def array(self) -> np.ndarray:
        """Return all paths, (N,)."""
        return np.concatenate([*self._parts, np.array(self._newest, np.bytes_)])


def _images_below(
    root: Path, key: str, others: Counter[str], endings: tuple[str, ...]
) -> Iterator[tuple[str | None, str]]:
    """Yield class name (None without labels) and path of every image beneath ``root``, sorted.

    Args:
        root: a folder with class folders, or with images.
        key: configuration key of ``root``, for messages.
        others: counts the pictures of formats that are not read, by ending; updated.
        endings: file name endings of images.
    Raises:
        DataError: ``root`` is missing, is not a folder, cannot be read or has no image.
    """
    if not root.is_dir():
        parent = next((parent for parent in root.absolute().parents if parent.is_dir()), None)
        nearest = f" ({parent} does)" if parent else ""
        is_file = f"is a file, not a folder or files of one kind: {', '.join(READ_FILES)}"
        what = is_file if root.exists() else f"does not exist{nearest}"
        raise DataError(f"The data path {root} {what}. Correct {key}.")
    work, number = SlowProgress(logger.warning), 0
    try:
        children = _children(root, endings)
        flat = any(isinstance(child, str) for child in children)
        top = identity(root.stat())
        visited = {top}
        for child in children:
            name = None if flat else Path(child).name
            # A folder that two class folders link to belongs to both classes. In a flat folder, its images would come
            # twice.
            for file in _beneath(root, child, visited if flat else {top}, others, endings):
                number += 1
                if number % _PER_PART == 0:
                    work.update(f"Listing {printable(root)}: {number:,} images")
                yield name, file
    except OSError as error:
        raise DataError(
            f"The data path {error.filename or root} cannot be listed: {error.strerror}. Correct {key}."
        ) from error
    if not number:
        read = ", ".join(endings)
        raise DataError(f"The data path {root} holds no image files ({read}).{held(endings_in(root))} Correct {key}.")


def _visible(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _children(folder: str | os.PathLike[str], endings: tuple[str, ...]) -> list[str | os.DirEntry[str]]:
    """List the visible entries of a folder, sorted by name: images as names, other files and folders as entries."""
    # Names take less memory than entries, and there may be a million images.
    # is_file: a named pipe called x.jpg would block the reader forever.
    children = [
        entry.name if entry.name.lower().endswith(endings) and entry.is_file() else entry for entry in _visible(folder)
    ]
    return sorted(children, key=lambda child: child if isinstance(child, str) else child.name)


def _beneath(
    folder: str | os.PathLike[str],
    child: str | os.DirEntry[str],
    visited: set[tuple[int, int]],
    others: Counter[str],
    endings: tuple[str, ...],
    depth: int = 0,
) -> Iterator[str]:
    """Yield the images at or below ``child``, sorted. A folder is visited once, so that cycles of links end.

    Args:
        folder: folder of ``child``.
        child: an image's name, or an entry of another file or folder.
        visited: device and inode of visited folders; updated.
        others: counts the pictures of formats that are not read, by ending; updated.
        endings: file name endings of images.
        depth: depth of the child below the root.
    """
    if isinstance(child, str):
        yield os.path.join(folder, child)  # noqa: PTH118 - millions of names
    elif depth > 32:
        # 40 is ELOOP: the caller reports it with the folder, like one that cannot be listed.
        raise OSError(40, "more than 32 folders deep", child.path)
    elif child.is_dir() and (file_id := identity(child.stat())) not in visited:
        visited.add(file_id)
        for below in _children(child.path, endings):
            yield from _beneath(child.path, below, visited, others, endings, depth + 1)
    elif (ending := os.path.splitext(child.name)[1].lower()) in PICTURES:  # noqa: PTH122 - millions of names
        others[ending] += 1


def identity(folder: os.stat_result) -> tuple[int, int]:
    """Return device and inode, which no two folders share."""
    return folder.st_dev, folder.st_ino


def _check_known(classes: list[str], request: SourceRequest) -> None:
    unknown = [name for name in classes if name not in request.class_names]
    if unknown:
        raise DataError(
            f"{request.key} has class folders that DATA.TRAIN does not have: "
            f"{', '.join(unknown[:10])}.{did_you_mean(unknown[0], request.class_names)} "
            "Use the same folder names in both."
        )


def _left_out(paths: Sequence[str], others: Counter[str], classes: set[str | None]) -> list[str]:
    sentences = [left_out(others, ", ".join(paths))] if others else []
    if None not in classes:
        names = {entry.name for path in paths for entry in _visible(Path(path)) if entry.is_dir()}
        if empty := sorted(names - classes):
            what = "1 folder has" if len(empty) == 1 else f"{len(empty):,} folders have"
            shown = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
            sentences.append(f"{what} no images, and {'is' if len(empty) == 1 else 'are'} no class: {shown}.")
    return sentences


@DATA_SOURCES.register("disk_filelist")
class DiskFilelist(ListedFiles):
    """Image files listed in a ``.npy`` array of paths or in a text file, one path a line.

    Several lists are joined, in the order of DATA_PATHS. A path that starts with REMOVE_IMG_PATH_PREFIX gets
    NEW_IMG_PATH_PREFIX in its place, so that a list written on another machine can be used here; a relative path counts
    from the folder of its list. Labels come from LABEL_SOURCES: [disk_filelist] and LABEL_PATHS.

    Raises:
        DataError: a list is missing, is no list of paths, or is empty.
    Cost: reads the lists. No image is looked up before it is used: on a network disk that takes hours.
    """

    def __init__(self, request: SourceRequest):
        key = request.key
        if not request.paths:
            raise DataError(f"disk_filelist needs a list of images: set {key}=[<paths.npy>].")
        old, new = request.path_prefix
        paths = [
            os.fsencode(moved(path, old, new, Path(list_file).absolute().parent))
            for list_file in request.paths
            for path in read_list(Path(list_file), key)
        ]
        # Fixed-width bytes, not a list of str: a copy goes to every loader worker.
        super().__init__(request, np.array(paths), np.full(len(paths), UNLABELLED, np.int8), ())


def moved(path: str, old: str, new: str, folder: Path) -> str:
    """Replace the prefix ``old`` of a path by ``new``; a relative path is relative to ``folder``."""
    if old and path.startswith(old):
        path = new + path[len(old) :]
    return os.path.join(folder, path)  # noqa: PTH118 - millions of paths: pathlib takes 10 times as long


def read_list(path: Path, key: str) -> list[str]:
    """Read the paths of images in a list file.

    Args:
        path: a ``.npy`` file with a 1-d array of strings, or a text file with one path per line (blank lines are
            skipped).
        key: configuration key of the list, for messages.
    Raises:
        DataError: the list is missing, is not such a file, or is empty.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"The list of images {path} is not a file. {key} of a disk_filelist names list files.")
    except OSError as error:
        raise DataError(f"The list of images {path} cannot be read: {error.strerror}. Correct {key}.") from error
    if path.suffix != ".npy":
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()  # Windows programs write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            fix = f"Correct {key}, or write it as text, one path a line."
            raise DataError(f"The list of images {path} is not text ({error}). {fix}") from error
        rows = [line.strip() for line in lines if line.strip()]
    else:
        rows = _read_array(path)
    if not rows:
        raise DataError(f"The list of images {path} is empty. Correct {key}.")
    return rows


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
    except ValueError as error:  # code points that are no characters
        raise DataError(f"The list of images {path} has text that is damaged ({error}). Write it again.") from error
