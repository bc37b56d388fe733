"""``metrics.jsonl``: one JSON object per optimizer step, for scripts and notebooks. Keys: ``docs/run_folder.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import rich

from vissl_zero.atomic import as_object, replacing
from vissl_zero.engine.hook import Hook, Records, Run, StepRecord
from vissl_zero.reporting.lossy_output import optional_output
from vissl_zero.sharding.memory import Bytes
from vissl_zero.terminal import print_line

FILE_NAME = "metrics.jsonl"


class MetricsFile(Hook):
    """Writes a line per step as soon as its values exist (0.1 ms), so a crash loses at most one line.

    A resumed run reads its earlier records from the file. A full or failing disk does not end the run: lines wait in
    memory until the disk accepts them again.
    """

    def __init__(self) -> None:
        self._console = rich.get_console()
        self._file: BinaryIO | None = None
        self._waiting: list[bytes] = []
        self._has_warned = False

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        path = run.folder / FILE_NAME
        with optional_output(FILE_NAME, self._console):
            if path.exists():
                _forget_after(path, run.step, run.records)
            # Unbuffered, so that each line is with the system at once, and a write tells how much of it the disk took.
            self._file = path.open("ab", buffering=0)

    def on_record(self, run: Run, record: StepRecord) -> None:
        if self._file is not None:
            self._waiting.append(line(record).encode() + b"\n")
            self._write(self._file)

    def close(self, run: Run) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, file: BinaryIO) -> None:
        """Write the waiting bytes; bytes of a line that the disk has accepted are not written again."""
        try:
            while self._waiting:
                # A raw file may accept only part of a line.
                self._waiting[0] = self._waiting[0][file.write(self._waiting[0]) :]
                if not self._waiting[0]:
                    self._waiting.pop(0)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = f"warning: {FILE_NAME} cannot be written ({error.strerror}); its lines wait in memory."
                print_line(text, self._console)


def line(record: StepRecord) -> str:
    """Return a step as a line of strict JSON; floats keep every digit (``repr``).

    JSON has no NaN and no infinity: such a value is null, and ``not_finite`` has its name and the value as a string.
    """
    flat = asdict(record)
    not_finite: dict[str, str] = {}
    entry = _finite(flat, "", not_finite)
    if not_finite:
        entry["not_finite"] = not_finite
    # Python would write NaN, which other readers of JSON refuse.
    return json.dumps(entry, allow_nan=False)


def _finite(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    """Return ``value`` with None for every NaN or infinity, which is added to ``not_finite`` under its dotted name."""
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}" if name else key, not_finite) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[name] = repr(value)
        return None
    return value


def _record_from(entry: Mapping[str, Any]) -> StepRecord:
    """Return the record of a line that ``line`` has written; values that were not finite are None.

    Raises:
        KeyError, TypeError: the entry is not of such a line.
    """
    known = {f.name for f in fields(StepRecord)}
    # ``not_finite`` is no field of a record, and a file of another version may have further keys.
    figures = {key: value for key, value in entry.items() if key in known}
    return StepRecord(**{**figures, "bytes": Bytes(**entry["bytes"])})


def read_records(path: Path, after: int = 0) -> Iterator[StepRecord]:
    """Yield the records of a ``metrics.jsonl`` after step ``after``, up to the first incomplete line.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                record = _record_from(as_object(text))
            except (ValueError, KeyError, TypeError):
                return
            if record.step > after:
                yield record


def _forget_after(path: Path, step: int, records: Records) -> None:
    """Remove the lines of steps after ``step`` (they will be repeated), and a last line that a crash left incomplete.

    The records of the remaining lines are added to ``records``.
    """
    with path.open(encoding="utf-8") as old, replacing(path) as temporary, temporary.open("w", encoding="utf-8") as new:
        for text in old:
            try:
                entry = as_object(text)
                if entry["step"] > step:
                    continue
                records.append(_record_from(entry))
            except (ValueError, KeyError, TypeError):
                break
            new.write(text.rstrip("\n") + "\n")
