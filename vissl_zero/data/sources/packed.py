"""Image files packed into few large ones: tars (``webdataset``), Arrow files (``arrow``), an LMDB database (``lmdb``).

All are read by index, so that the loader decides the order of an epoch, and the pixels equal those of the folder.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vissl_zero.atomic import read_object, replacing
from vissl_zero.data.decode import BrokenImageError, read_file
from vissl_zero.data.labels import (
    MIXED,
    class_numbers,
    joined,
    label_text,
    numbered,
    require_every_label,
    unequal_labels,
)
from vissl_zero.data.slow_work import SlowProgress
from vissl_zero.data.source import UNLABELLED, EncodedSource, SourceRequest
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES
from vissl_zero.resolve.image_files import EXTENSIONS

CLASSES_FILE = "classes.json"
LABELS_KEY, CLASSES_KEY = b"__labels__", b"__classes__"  # of an LMDB database
logger = logging.getLogger(__name__)
_INDEX_FILE = ".vissl_zero_index.npz"
# A larger member of a tar is no label, and is not read into memory.
_MOST_JSON = 2**26
_WHOLE = re.compile(r"-?[0-9]{1,18}")  # fits into int64


class Packed(EncodedSource):
    """Base of packed sources: labels, numbered by TRAIN's classes.

    Args:
        request: request of the source.
        labels: (N,) integers, -1 without a label; or names of classes, "" without.
        names: names of the classes; empty: the class numbers, or the names that occur in ascending order.
    Raises:
        DataError: some of the images have labels and others none, or a label is none of the classes.
    """

    def __init__(self, request: SourceRequest, labels: np.ndarray, names: Sequence[str]):
        super().__init__(request.decoder)
        is_text = labels.dtype.kind == "U"
        is_labeled = labels != "" if is_text else labels >= 0
        require_every_label(len(labels) - int(is_labeled.sum()), len(labels), request.paths)
        self.class_names: tuple[str, ...] = ()
        self._labels = np.full(len(labels), UNLABELLED)
        if not is_labeled.any():
            return
        if is_text:
            self._labels, self.class_names = numbered(labels, names, CLASSES_FILE, request)
            return
        classes = tuple(names) or tuple(map(str, range(int(labels.max()) + 1)))
        if int(labels.max()) >= len(classes):
            raise DataError(f"{', '.join(request.paths)} has labels up to {labels.max()}, but {len(classes)} classes.")
        self.class_names, self._labels = classes, labels
        if request.class_names:
            number = class_numbers(classes, request.class_names, "DATA.TRAIN", request)
            labels = np.array([number[name] for name in classes])[labels]
            self.class_names, self._labels = request.class_names, labels

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, index: int) -> int | None:
        label = int(self._labels[index])
        return None if label == UNLABELLED else label


def one_path(request: SourceRequest, what: str) -> Path:
    """Return the only path of a request. Raises DataError if there are several, or the path does not exist."""
    if len(request.paths) != 1 or not Path(request.paths[0]).exists():
        raise DataError(f"{request.key} must name {what} that exists, got {', '.join(request.paths) or 'nothing'}.")
    return Path(request.paths[0])


def missing(library: str, extra: str) -> DataError:
    """Return the error for a missing library, with the command that installs it."""
    return DataError(f"This data source needs {library}. Run pip install vissl-zero[{extra}].")


def _class_names(folder: Path) -> list[str]:
    """Read the class names in ``classes.json``; empty without the file."""
    try:
        names = json.loads((folder / CLASSES_FILE).read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder / CLASSES_FILE} cannot be read ({error}). Write a JSON list of names.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{folder / CLASSES_FILE} must be a JSON list of names.")
    return names


@DATA_SOURCES.register("webdataset")
class WebDataset(Packed):
    """Tars as webdataset writes them: files that share a name up to its first dot are a sample.

    An image, and ``cls`` (number or name of its class) or ``json`` with a ``label``. ``classes.json`` beside the tars
    may list the classes. Images come in the order of the tars' names, then as they lie in a tar.

    Cost: the first time, reads the headers of all tars. The index is kept beside them, where that can be written, and
    made again when a tar's size or time has changed.
    """

    def __init__(self, request: SourceRequest):
        if not request.paths:
            raise DataError(f"webdataset needs tars: set {request.key}=[<folder of tars>].")
        self._tars = [os.fsencode(tar) for path in request.paths for tar in _tars_in(Path(path), request.key)]
        work, indexes = SlowProgress(logger.warning), []
        for number, tar in enumerate(self._tars):
            indexes.append(_index_of(Path(os.fsdecode(tar))))
            work.update(f"Reading the index of tars: {number + 1:,} of {len(self._tars):,}")
        self._tar = np.repeat(np.arange(len(indexes)), [len(index["offset"]) for index in indexes])
        self._offset, self._size, labels, self._key = (
            np.concatenate([index[part] for index in indexes]) for part in ("offset", "size", "label_text", "key")
        )
        if not len(self._tar):
            raise DataError(f"{', '.join(request.paths)} has no images ({', '.join(EXTENSIONS)}) in its tars.")
        first = Path(request.paths[0])
        names = _class_names(first if first.is_dir() else first.parent)
        super().__init__(request, _numbers_or_names(labels, request.paths), names)

    def encoded(self, index: int) -> bytes:
        """Read the file out of its tar. Raises BrokenImageError."""
        size = int(self._size[index])
        try:
            # Opened for each image: a kept file would share its position with forked workers.
            with open(self._tars[self._tar[index]], "rb") as tar:  # noqa: PTH123 - bytes
                tar.seek(int(self._offset[index]))
                data = tar.read(size)
        except OSError as error:
            raise BrokenImageError(self.name(index), f"its tar cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise BrokenImageError(self.name(index), "its tar is truncated")
        return data

    def name(self, index: int) -> str:
        """Return the tar's path and the file's name in it."""
        return f"{os.fsdecode(self._tars[self._tar[index]])}:{os.fsdecode(bytes(self._key[index]))}"


def _tars_in(path: Path, key: str) -> list[Path]:
    """List the tars in a folder, sorted by name; ``path`` itself if it is a file. ``key``: its name, for messages."""
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path] if path.is_file() else []
    if not tars:
        raise DataError(f"{path} has no tars. Correct {key}.")
    return tars


def _index_of(tar: Path) -> dict[str, np.ndarray]:
    """Return the offsets, sizes, labels and names of a tar's images, from its index file unless the tar has changed."""
    facts = tar.stat()
    stamp = np.array([facts.st_size, facts.st_mtime_ns])
    kept = tar.with_name(f".{tar.name}{_INDEX_FILE}")
    try:
        with np.load(kept) as arrays:
            index = {name: arrays[name] for name in ("stamp", "offset", "size", "label_text", "key")}
        if np.array_equal(index["stamp"], stamp) and len({len(index[name]) for name in list(index)[1:]}) == 1:
            return index
    except Exception:  # noqa: BLE001, S110 - missing, damaged, of another version: it is made again
        pass
    # The stamp from before reading: if the tar changes meanwhile, the index is made again.
    index = {"stamp": stamp, **_read_index(tar)}
    try:
        with replacing(kept) as path, path.open("wb") as file:
            np.savez(file, **index)
    except OSError:
        pass  # a folder that cannot be written
    return index


def _read_index(tar: Path) -> dict[str, np.ndarray]:
    places: list[tuple[int, int, bytes, bytes]] = []
    labels: dict[bytes, str] = {}
    try:
        # Without compression, because an image is read by its offset.
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                # Without a stem it is a hidden file: macOS packs one (._name) beside each of its files.
                if not member.isfile() or not stem:
                    continue
                key = os.fsencode(f"{folder}/{stem}")
                if f".{extension.lower()}".endswith(EXTENSIONS):
                    places.append((member.offset_data, member.size, key, os.fsencode(member.name)))
                elif extension.lower() in ("cls", "json") and member.size <= _MOST_JSON:
                    content = opened.extractfile(member)
                    assert content is not None
                    labels[key] = _label_in(content.read(), extension.lower(), f"{tar}:{member.name}")
            # A tar that was cut between two files reads as a shorter one, but for the block of zeros at its end.
            if opened.offset >= tar.stat().st_size:
                raise ValueError("it has no end: it was cut off, and files are missing")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(f"{tar} cannot be read as a tar ({error}). Write it again, without compression.") from error
    return {
        "offset": np.array([place[0] for place in places], np.int64),
        "size": np.array([place[1] for place in places], np.int64),
        "label_text": np.array([labels.get(place[2], "").encode() for place in places], np.bytes_),
        "key": np.array([place[3] for place in places], np.bytes_),
    }


def _label_in(content: bytes, extension: str, place: str) -> str:
    """Return the label in a member of a tar, "" without one. Raises DataError."""
    try:
        text = content.decode()
        value = json.loads(text) if extension == "json" else {"label": text}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} cannot be read as a label ({error}). Write a name or a whole number.") from error
    return label_text(value.get("label") if isinstance(value, dict) else None, place)


def _numbers_or_names(labels: np.ndarray, paths: Sequence[str]) -> np.ndarray:
    """Convert labels, UTF-8, to integers (-1 for "") if they are whole numbers; else to text. DataError if mixed."""
    # Distinct ones first: there may be millions of labels, but few that differ.
    distinct, at = np.unique(labels, return_inverse=True)
    texts = [text.decode() for text in distinct.tolist()]
    are_numbers = {_WHOLE.fullmatch(text) is not None for text in texts if text}
    if len(are_numbers) > 1:
        raise unequal_labels(paths, MIXED)
    if False in are_numbers:
        return np.array(texts, np.str_)[at]
    return np.array([int(text or UNLABELLED) for text in texts], np.int64)[at]


SPLITS = {"TRAIN": ("train",), "TEST": ("test", "validation", "val")}


@DATA_SOURCES.register("arrow")
class ArrowFiles(Packed):
    """A data set of Hugging Face's ``datasets`` on disk: ``save_to_disk``'s folder, or a folder of its Arrow files.

    Images are a column of files (``Image``, or binary), labels a column of integers or names (``label``); names of
    classes are those of its ``ClassLabel``. Where a folder has splits, TRAIN takes train, TEST takes test or
    validation. Files are mapped into memory, not read.
    """

    def __init__(self, request: SourceRequest):
        folder = one_path(request, "a data set's folder")
        if (folder / "dataset_dict.json").is_file():
            splits = [folder / name for name in SPLITS[request.split] if (folder / name).is_dir()]
            if not splits:
                raise DataError(f"{folder} has no split {' or '.join(SPLITS[request.split])}.")
            folder = splits[0]
        self._files = [os.fsencode(file) for file in _arrow_files(folder)]
        self._tables: list[Any] = []
        tables = self._open()
        self._starts = np.cumsum([0, *(len(table) for table in tables)])
        schema = tables[0].schema
        self._column = image_column(schema, folder)
        names, column = label_column(schema)
        unlabeled = np.full(int(self._starts[-1]), UNLABELLED)
        labels = [labels_in(table[column], column, folder) for table in tables] if column else [unlabeled]
        super().__init__(request, joined(labels, request.paths), names)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_tables": []}  # a mapped table would be pickled with its content

    def _open(self) -> list[Any]:
        if not self._tables:
            try:
                import pyarrow as pa
            except ModuleNotFoundError as error:
                raise missing("pyarrow", "arrow") from error
            self._tables = [_table(pa, os.fsdecode(file)) for file in self._files]
        return self._tables

    def encoded(self, index: int) -> bytes:
        """Read the file out of its table. Raises BrokenImageError."""
        at = int(np.searchsorted(self._starts, index, "right")) - 1
        value = self._open()[at][self._column][index - int(self._starts[at])].as_py()
        return file_in(value, self.name(index))

    def name(self, index: int) -> str:
        """Return the folder's first file, and the row."""
        return f"{Path(os.fsdecode(self._files[0])).parent} row {index}"


def file_in(value: Any, name: str) -> bytes:
    """Return the file content in a row of ``image_column``, or of the file at its path. Raises BrokenImageError."""
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        return read_file(value)
    if value is None:
        raise BrokenImageError(name, "its row has no image")
    return bytes(value)


def _table(pa: Any, file: str) -> Any:
    """Map a file of Arrow's stream format, or of its file format."""
    try:
        try:
            # ``datasets`` writes streams, and other programs the file format.
            return pa.ipc.open_stream(pa.memory_map(file)).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(pa.memory_map(file)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read as an Arrow file ({error}).") from error


def _arrow_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if (folder / "state.json").is_file():
        state = read_object(folder / "state.json")
        if state.get("_indices_files"):
            raise DataError(f"{folder} selects rows by an index. Write it again with flatten_indices().save_to_disk().")
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    else:
        files = sorted(folder.glob("*.arrow"))
    if not files:
        raise DataError(f"{folder} has no Arrow files.")
    return files


def image_column(schema: Any, path: Path) -> str:
    """Return the first column of files: binary, or Hugging Face's structure of bytes and path. Raises DataError."""
    for field in schema:
        kind = str(field.type)
        if kind.startswith("struct<bytes: ") or kind in ("binary", "large_binary"):
            return str(field.name)
    raise DataError(f"{path} has no column of image files; its columns are {', '.join(schema.names)}.")


def label_column(schema: Any) -> tuple[list[str], str]:
    """Return the names of the classes, and the column of labels; empty without labels."""
    column = next((name for name in ("label", "labels", "fine_label") if name in schema.names), "")
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return list(about["info"]["features"][column]["names"]), column
    except (ValueError, KeyError, TypeError):
        return [], column


def labels_in(values: Any, column: str, path: Path) -> np.ndarray:
    """Return the labels in a column of Arrow.

    Args:
        values: chunked array of integers or text, plain or encoded by a dictionary.
        column: its name.
        path: its file or folder, for messages.
    Returns:
        (N,) integers, -1 where null; or text, "" where null.
    Raises:
        DataError: the column is of another type.
    """
    import pyarrow as pa

    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return np.asarray(values.cast(pa.int64()).fill_null(UNLABELLED).to_numpy(), np.int64)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(values.cast(kind).fill_null("").to_pylist(), np.str_)
    raise DataError(f"{path}: the column {column} is of {values.type}. Write names or whole numbers, or rename it.")


# The process is a part of the key only: LMDB forbids the use of an environment after a fork.
@cache
def _environment(path: str, process: int) -> Any:
    """Open a database once per process: LMDB forbids a second time, and evaluation may read that of training."""
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise missing("lmdb", "lmdb") from error
    try:
        # No lock file, which a disk mounted read-only could not hold. No readahead, since images are read at random.
        found = lmdb.open(path, readonly=True, lock=False, readahead=False, subdir=Path(path).is_dir())
    except lmdb.Error as error:
        raise DataError(f"{path} cannot be read as an LMDB database ({error}).") from error
    # It is mapped into memory: to read a page that the file lacks would end the process by a signal.
    file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
    facts = found.stat()
    # The pages in use, and two of the database itself. A free page at the end need not be in the file.
    pages = facts["branch_pages"] + facts["leaf_pages"] + facts["overflow_pages"] + 2
    if (num_bytes := file.stat().st_size) < pages * facts["psize"]:
        found.close()
        how = f"it has {num_bytes:,} bytes, and its pages {pages * facts['psize']:,}: it was cut off"
        raise DataError(f"{path} cannot be read as an LMDB database ({how}). Copy it again.")
    return found


@DATA_SOURCES.register("lmdb")
class Lmdb(Packed):
    """An LMDB database: a file under each key, images in the order of the keys.

    ``__labels__`` may hold the labels, an array in .npy's format, and ``__classes__`` their names, a JSON list.
    """

    def __init__(self, request: SourceRequest):
        self._path = str(one_path(request, "an LMDB database"))
        with self._read() as transaction:
            keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]
            kept = transaction.get(LABELS_KEY), transaction.get(CLASSES_KEY)
        self._keys = np.array([key for key in keys if key not in (LABELS_KEY, CLASSES_KEY)])
        try:
            unlabeled = np.full(len(self._keys), UNLABELLED)
            labels = unlabeled if kept[0] is None else np.load(io.BytesIO(kept[0]))
            names = [] if kept[1] is None else json.loads(kept[1])
        except ValueError as error:
            raise DataError(f"{self._path} has labels that cannot be read ({error}). Pack it again.") from error
        if not len(self._keys) or len(labels) != len(self._keys):
            raise DataError(f"{self._path} has {len(self._keys)} images and {len(labels)} labels.")
        super().__init__(request, labels, names)

    def _read(self) -> Any:
        return _environment(self._path, os.getpid()).begin()

    def encoded(self, index: int) -> bytes:
        """Read the file under its key. Raises BrokenImageError."""
        with self._read() as transaction:
            data = transaction.get(bytes(self._keys[index]))
        if data is None:
            raise BrokenImageError(self.name(index), "its key is gone")
        return bytes(data)

    def name(self, index: int) -> str:
        """Return the database's path and the key."""
        return f"{self._path}:{os.fsdecode(bytes(self._keys[index]))}"
