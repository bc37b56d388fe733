"""Image files in the rows of Parquet files (``parquet``), as the Hugging Face hub keeps data sets."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.labels import joined
from vissl_zero.data.source import UNLABELLED, SourceRequest
from vissl_zero.data.sources.packed import (
    SPLITS,
    Packed,
    file_in,
    image_column,
    label_column,
    labels_in,
    missing,
)
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES

_KEPT_BYTES = 2**25  # cache of row groups, in each process


@DATA_SOURCES.register("parquet")
class ParquetFiles(Packed):
    """Parquet files, or folders of them, with a column of image files; columns are those of ``arrow``.

    Of files named after splits (the hub's ``train-00000-of-00002.parquet``, perhaps in ``data/``), TRAIN takes train,
    and TEST takes test or validation. Images come in the order of the files' names, then of their rows.

    Cost: Parquet can only be read by the row group. The newest ones, up to 32 MiB, stay in memory; an image of another
    one costs reading that row group.
    """

    def __init__(self, request: SourceRequest):
        if not request.paths:
            raise DataError(f"parquet needs files: set {request.key}=[<folder of .parquet>].")
        files = [file for path in request.paths for file in _files_in(Path(path), request)]
        self._files = [os.fsencode(file) for file in files]
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._column, column, names = "", "", list[str]()
        groups: list[tuple[int, int, int]] = []
        labels: list[np.ndarray] = []
        for number, path in enumerate(files):
            with self._open(number) as file:
                if not number:
                    self._column = image_column(file.schema_arrow, path)
                    names, column = label_column(file.schema_arrow)
                for name in filter(None, (self._column, column)):
                    if name not in file.schema_arrow.names:
                        raise DataError(f"{path} has no column {name}, which {files[0]} has.")
                rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                groups += [(number, group, count) for group, count in enumerate(rows)]
                labels.append(_labels(file, column, path) if column else np.full(sum(rows), UNLABELLED))
        self._place = np.array([place[:2] for place in groups], np.int64).reshape(-1, 2)
        self._starts = np.cumsum([0, *(place[2] for place in groups)])
        if not self._starts[-1]:
            raise DataError(f"{', '.join(request.paths)} has no rows. Correct {request.key}.")
        super().__init__(request, joined(labels, request.paths), names)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}  # each process keeps its own

    def _open(self, number: int) -> Any:
        """Open a file; the caller closes it after use, since a process may not keep thousands of files open."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError as error:
            raise missing("pyarrow", "arrow") from error
        path = os.fsdecode(self._files[number])
        try:
            return pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as a Parquet file ({error}).") from error

    def _images(self, at: int) -> Any:
        """Return the column of images of row group ``at``, counted over all files."""
        if at not in self._kept:
            number, group = self._place[at].tolist()
            with self._open(number) as file:
                # Workers are processes already: pyarrow's threads would compete with them.
                self._kept[at] = file.read_row_group(group, [self._column], use_threads=False)[self._column]
            # The newest stays, however large it is: otherwise each of its images would read it again.
            while len(self._kept) > 1 and sum(images.nbytes for images in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        return self._kept[at]

    def encoded(self, index: int) -> bytes:
        """Read the file out of its row group. Raises BrokenImageError."""
        at = int(np.searchsorted(self._starts, index, "right")) - 1
        try:
            value = self._images(at)[index - int(self._starts[at])].as_py()
        except (OSError, ValueError, IndexError, DataError) as error:  # pyarrow's errors are ValueError or OSError
            raise BrokenImageError(self.name(index), f"its row group cannot be read ({error})") from error
        return file_in(value, self.name(index))

    def name(self, index: int) -> str:
        """Return the file's path, and the row in it."""
        at = int(np.searchsorted(self._starts, index, "right")) - 1
        number = int(self._place[at, 0])
        first = int(self._starts[np.searchsorted(self._place[:, 0], number)])
        return f"{os.fsdecode(self._files[number])} row {index - first}"


def _files_in(path: Path, request: SourceRequest) -> list[Path]:
    """List the Parquet files of a request's split in a folder, sorted by name; ``path`` itself if it is a file."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if not files:
        raise DataError(f"{path} has no Parquet files. Correct {request.key}.")
    of_split = {file: file.name.split("-")[0].removesuffix(".parquet") for file in files}
    if not any(name in names for name in of_split.values() for names in SPLITS.values()):
        return files
    if not (chosen := [file for file, name in of_split.items() if name in SPLITS[request.split]]):
        raise DataError(
            f"{path} has no split {' or '.join(SPLITS[request.split])}: its files are those of other splits."
        )
    return chosen


def _labels(file: Any, column: str, path: Path) -> np.ndarray:
    import pyarrow as pa

    try:
        return labels_in(file.read([column], use_threads=False)[column], column, path)
    except (pa.ArrowException, OSError, TypeError) as error:
        raise DataError(f"{path}: the column {column} cannot be read ({error}).") from error
