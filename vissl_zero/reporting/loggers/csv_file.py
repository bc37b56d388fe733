"""``metrics.csv``: one row per step, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from vissl_zero.atomic import replacing
from vissl_zero.registry import LOGGERS
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger

FILE_NAME = "metrics.csv"
_STEP = "step"


@LOGGERS.register("csv")
class CsvFile(Logger):
    """One table, metrics.csv: a row per step.

    The first column is ``step``; a figure that a step lacks is empty. The row of step 0 has what was measured before
    training. A tag that appears later adds a column, for which the file is written again. Cost: 0.03 ms per step; a row
    is on disk when it is logged.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._columns: list[str] = [_STEP]
        self._file: BinaryIO | None = None

    def open(self, run: LoggedRun) -> int:
        self._path = run.folder / FILE_NAME
        rows = [row for row in _read(self._path) if int(row[_STEP]) <= run.step] if self._path.exists() else []
        held = int(rows[-1][_STEP]) if rows else 0
        if not held:  # the row of step 0 is logged again
            rows = []
        for row in rows[:1]:
            self._columns = list(row)
        self._rewrite(rows)
        return held

    def log(self, figures: Mapping[str, float], step: int) -> None:
        assert self._file is not None
        if new := [tag for tag in figures if tag not in self._columns]:
            rows = list(_read(self._path))
            self._columns += new
            self._rewrite(rows)
        # ``repr``: the shortest text that reads back as the same number.
        self._file.write(self._line({_STEP: str(step), **{tag: repr(value) for tag, value in figures.items()}}))

    def close(self, is_over: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by a header and ``rows``, and open it to append."""
        if self._file is not None:
            self._file.close()
        with replacing(self._path) as temporary:
            lines = (self._line(row) for row in rows)
            temporary.write_bytes(b"".join([self._line(dict(zip(self._columns, self._columns, strict=True))), *lines]))
        self._file = self._path.open("ab", buffering=0)

    def _line(self, row: Mapping[str, str]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([row.get(column, "") for column in self._columns])
        return text.getvalue().encode()


def _read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows, up to one that is cut short."""
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    # A kill may have cut the last line, and a cut number would read as another one.
    whole = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(io.StringIO(whole)):
        if not (row.get(_STEP) or "").isdecimal() or None in row or None in row.values():
            return
        yield row
