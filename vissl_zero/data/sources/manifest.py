"""Image files and labels listed in a table (``manifest``): CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from vissl_zero.data.labels import MIXED, class_numbers, ordered_classes, require_every_label, unequal_labels
from vissl_zero.data.source import UNLABELLED, MultiLabeled, Source, SourceRequest
from vissl_zero.data.sources.disk import ListedFiles, moved
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES

_BETWEEN_LABELS = "|"  # in a cell of CSV
_COLUMNS = ("path", "label", "labels")
_BEHIND = None  # stands for the cells behind the last column
_MOST_LINES = 5  # named in a message


@DATA_SOURCES.register("manifest")
def manifest(request: SourceRequest) -> Source:
    """Tables of images: CSV with a header, or an object of JSON a line; ``path``, and ``label`` or ``labels``.

    Names of columns count without capitals and spaces around them. A label is a name or a number. ``labels`` are
    several: a list, or names with ``|`` between them. Classes are in ascending order. Relative paths count from the
    folder of their table; REMOVE_IMG_PATH_PREFIX and NEW_IMG_PATH_PREFIX apply. Several tables are joined, in the order
    of DATA_PATHS.

    Raises:
        DataError: a table is missing, damaged or empty, or some of the images have labels and others none, or of
            another kind.
    Cost: reads the tables. No image is looked up before it is used.
    """
    key = request.key
    if not request.paths:
        raise DataError(f"manifest needs a table of images: set {key}=[<table.csv or table.jsonl>].")
    old, new = request.path_prefix
    files: list[bytes] = []
    labels: list[tuple[str | int, ...] | None] = []
    has_several, columns = set[bool](), dict[str, None]()
    for table in map(Path, request.paths):
        folder = table.absolute().parent
        for place, row in _rows(table, key):
            files.append(_file_in(row, place, lambda path: moved(path, old, new, folder)))  # noqa: B023 - called here
            labels.append(_labels_in(row, place))
            has_several.add(row.get("labels") is not None)
            columns.update(dict.fromkeys(row))
    if not files:
        raise DataError(f"{', '.join(request.paths)} names no images. Correct {key}.")
    without = labels.count(None)
    require_every_label(without, len(labels), request.paths)
    if len(has_several) > 1:
        raise unequal_labels(request.paths, "both label and labels are used")
    if without == len(labels):
        source = ListedFiles(request, np.array(files), np.full(len(files), UNLABELLED), ())
        source.left_out = _unread(columns, request.paths)
        return source
    return _labeled(np.array(files), [each for each in labels if each is not None], has_several == {True}, request)


def _unread(columns: Iterable[str], paths: Sequence[str]) -> list[str]:
    """Return a sentence on the columns of a table without labels that are not read."""
    others = [name for name in columns if name and name not in _COLUMNS]
    if not others or "label" in columns or "labels" in columns:
        return []
    what = f"no column label or labels; these are not read: {', '.join(others[:10])}"
    return [f"{', '.join(paths)}: {what}."]


def _labeled(
    files: np.ndarray, written: Sequence[tuple[str | int, ...]], is_multiple: bool, request: SourceRequest
) -> Source:
    kinds = {type(label) for each in written for label in each if type(label) is int or not str(label).isdecimal()}
    if len(kinds) > 1:
        raise unequal_labels(request.paths, MIXED)
    labels = [tuple(map(str, each)) for each in written]
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
                        yield f"{table}, line {number},", dict(zip(_named(row, table), row.values(), strict=True))
                return
            for number, row in _rows_of_csv(file, table):
                yield f"{table}, line {number},", row
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        at = f" after line {number}" if number and not is_json else f", line {number}," if number else ""
        fix = "Write CSV with a header, or JSON lines (.jsonl)."
        raise DataError(f"{table}{at} cannot be read as a table of images ({error}). {fix}") from error


def _rows_of_csv(file: TextIO, table: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line, row) for each row of a table in CSV. Raises DataError, csv.Error."""
    header = csv.reader(file, strict=True)
    names = next(header, [])
    columns = _named(names, table)
    if "path" not in columns:
        must = "The first line must name the columns: path, and label or labels"
        raise DataError(f"{table} has no column path; its columns are {', '.join(names) or 'none'}. {must}.")
    # Who writes "path, label" writes a space in the rows too.
    is_spaced = any(name != name.lstrip() for name in names)
    reader = csv.DictReader(file, columns, restkey=_BEHIND, strict=True, skipinitialspace=is_spaced)
    short, long = list[int](), list[int]()
    for row in reader:
        number = header.line_num + reader.line_num
        if None in (row[name] for name in columns if name in _COLUMNS):
            short.append(number)
        elif any(cell.strip() for cell in row.pop(_BEHIND, ())):
            long.append(number)
        else:
            yield number, row
    _require_cells(table, short, long)


def _require_cells(table: Path, short: Sequence[int], long: Sequence[int]) -> None:
    """Raise DataError if lines of ``table`` are too short or too long."""
    kinds = ((short, "fewer", "Write all of them."), (long, "more", "Put cells with a comma in quotes."))
    sentences = []
    for lines, how, fix in kinds:
        some = ", ".join(map(str, lines[:_MOST_LINES]))
        rest = f" and {len(lines) - _MOST_LINES:,} more" if len(lines) > _MOST_LINES else ""
        which = f"lines {some}{rest}, have" if len(lines) > 1 else f"line {some}, has"
        sentences += [f"{table}, {which} {how} cells than the first line. {fix}"] if lines else []
    if sentences:
        raise DataError(" ".join(sentences))


def _named(names: Iterable[str], table: Path) -> list[str]:
    """Return names of columns in lower case and without spaces around them. Raises DataError where one occurs twice."""
    columns = [name.strip().casefold() for name in names]
    if twice := [name for name in _COLUMNS if columns.count(name) > 1]:
        raise DataError(f"{table} has the column {twice[0]} twice. Leave one of them out.")
    return columns


def _file_in(row: Mapping[str, Any], place: str, move: Callable[[str], str]) -> bytes:
    path = row.get("path")
    try:
        if isinstance(path, str) and path and "\0" not in path:
            return os.fsencode(move(path))
    except UnicodeEncodeError:  # an unpaired surrogate from JSON's \u escapes
        pass
    raise DataError(f"{place} has no path of an image. Write one under {'path'!r}.")


def _labels_in(row: Mapping[str, Any], place: str) -> tuple[str | int, ...] | None:
    """Return the labels of a row, one for ``label``; None without labels."""
    several, one = row.get("labels"), row.get("label")
    if several is None:
        if one is None or (isinstance(one, str) and not one.strip()):
            return None
        labels = [one]
    elif one not in (None, ""):
        raise DataError(f"{place} has label and labels. Leave one of them out.")
    else:
        labels = (
            [part for part in several.split(_BETWEEN_LABELS) if part.strip()] if isinstance(several, str) else several
        )
    if not isinstance(labels, list) or not all(type(label) in (str, int) for label in labels):
        raise DataError(f"{place} has {labels!r} for a label. Write names or whole numbers.")
    return tuple(label.strip() if isinstance(label, str) else label for label in labels)
