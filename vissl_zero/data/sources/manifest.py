"""Image files and labels listed in a table (``manifest``): CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vissl_zero.data.labels import class_numbers, ordered_classes, require_every_label, unequal_labels
from vissl_zero.data.source import UNLABELLED, MultiLabeled, Source, SourceRequest
from vissl_zero.data.sources.disk import ListedFiles, moved
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES

_BETWEEN_LABELS = "|"  # in a cell of CSV


@DATA_SOURCES.register("manifest")
def manifest(request: SourceRequest) -> Source:
    """Tables of images: CSV with a header, or an object of JSON a line; ``path``, and ``label`` or ``labels``.

    A label is a name or a number. ``labels`` are several: a list, or names with ``|`` between them. Classes are in
    ascending order. Relative paths count from the folder of their table; REMOVE_IMG_PATH_PREFIX and
    NEW_IMG_PATH_PREFIX apply. Several tables are joined, in the order of DATA_PATHS.

    Raises:
        DataError: a table is missing, damaged or empty, or some of the images have labels and others none.
    Cost: reads the tables. No image is looked up before it is used.
    """
    key = f"config.DATA.{request.split}.DATA_PATHS"
    if not request.paths:
        raise DataError(f"manifest needs a table of images: set {key}=[<table.csv or table.jsonl>].")
    old, new = request.path_prefix
    files: list[bytes] = []
    labels: list[tuple[str, ...] | None] = []
    has_several = set[bool]()
    for table in map(Path, request.paths):
        folder = table.absolute().parent
        for place, row in _rows(table, key):
            files.append(_file_in(row, place, lambda path: moved(path, old, new, folder)))  # noqa: B023 - called here
            labels.append(_labels_in(row, place))
            has_several.add(row.get("labels") is not None)
    if not files:
        raise DataError(f"{', '.join(request.paths)} names no images. Correct {key}.")
    without = labels.count(None)
    require_every_label(without, len(labels), request.paths)
    if len(has_several) > 1 and not without:
        raise unequal_labels(request.paths, "both label and labels are used")
    return _labeled(np.array(files), [each for each in labels if each is not None], has_several == {True}, request)


def _labeled(files: np.ndarray, labels: Sequence[tuple[str, ...]], is_multiple: bool, request: SourceRequest) -> Source:
    if not labels:
        return ListedFiles(request, files, np.full(len(files), UNLABELLED), ())
    used = {label for each in labels for label in each}
    names = tuple(request.class_names) or ordered_classes(used)
    number = class_numbers(used, names, "DATA.TRAIN", request)
    if not is_multiple:
        return ListedFiles(request, files, np.array([number[label] for (label,) in labels]), names)
    matrix = np.zeros((len(files), len(names)), np.int8)
    for row, each in enumerate(labels):
        matrix[row, [number[label] for label in each]] = 1
    return MultiLabeled(ListedFiles(request, files, np.full(len(files), UNLABELLED), ()), matrix, names)


def _rows(table: Path, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (position for messages, row) for each row of a table."""
    is_json = table.suffix.lower() in (".jsonl", ".ndjson")
    if not table.is_file():  # a pipe would block for ever
        raise DataError(f"The table of images {table} is not a file. Correct {key}.")
    number = 0
    try:
        # surrogateescape keeps file names that are not UTF-8; newline: only a line feed ends a line of JSON.
        with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n" if is_json else "") as file:
            if is_json:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise ValueError("a line must be an object")
                        yield f"{table}, line {number},", row
                return
            reader = csv.DictReader(file, strict=True)
            if "path" not in (reader.fieldnames or ()):
                columns = ", ".join(map(str, reader.fieldnames or ())) or "none"
                must = "The first line must name the columns: path, and label or labels"
                raise DataError(f"{table} has no column path; its columns are {columns}. {must}.")
            for row in reader:
                number = reader.line_num
                yield f"{table}, line {number},", row
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        at = f" after line {number}" if number and not is_json else f", line {number}," if number else ""
        fix = "Write CSV with a header, or JSON lines (.jsonl)."
        raise DataError(f"{table}{at} cannot be read as a table of images ({error}). {fix}") from error


def _file_in(row: Mapping[str, Any], place: str, move: Callable[[str], str]) -> bytes:
    path = row.get("path")
    try:
        if isinstance(path, str) and path and "\0" not in path:
            return os.fsencode(move(path))
    except UnicodeEncodeError:  # an unpaired surrogate from JSON's \u escapes
        pass
    raise DataError(f"{place} has no path of an image. Write one under {'path'!r}.")


def _labels_in(row: Mapping[str, Any], place: str) -> tuple[str, ...] | None:
    """Return the labels of a row as strings, one for ``label``; None without labels."""
    several, one = row.get("labels"), row.get("label")
    if several is None:
        if one is None or one == "":
            return None
        labels = [one]
    elif one not in (None, ""):
        raise DataError(f"{place} has label and labels. Leave one of them out.")
    else:
        labels = [part for part in several.split(_BETWEEN_LABELS) if part] if isinstance(several, str) else several
    if not isinstance(labels, list) or not all(type(label) in (str, int) for label in labels):
        raise DataError(f"{place} has {labels!r} for a label. Write names or whole numbers.")
    return tuple(map(str, labels))
