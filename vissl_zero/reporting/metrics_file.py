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
    """Writes a line per step as soon as its figures exist (0.1 ms), so a crash loses at most one.

    A resumed run has its earlier records back from the file. A disk that is full, or fails, does not end the run: lines
    wait in memory and are written when it takes them again.
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
        """Write what waits; what the disk has taken of a line is not written again."""
        try:
            while self._waiting:
                self._waiting[0] = self._waiting[0][file.write(self._waiting[0]) :]
                if not self._waiting[0]:
                    self._waiting.pop(0)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = f"warning: {FILE_NAME} cannot be written ({error.strerror}); its lines wait in memory."
                print_line(text, self._console)


def line(record: StepRecord) -> str:
    """Write one step as strict JSON on one line; floats keep every digit (``repr``).

    JSON has no NaN and no infinity: such a figure is null, and ``not_finite`` holds its name and what it was.
    """
    flat = asdict(record)
    not_finite: dict[str, str] = {}
    entry = _finite(flat, "", not_finite)
    if not_finite:
        entry["not_finite"] = not_finite
    return json.dumps(entry, allow_nan=False)


def _finite(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    """Replace every NaN or infinity in ``value`` by None, each noted in ``not_finite`` under its dotted name."""
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}" if name else key, not_finite) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[name] = repr(value)
        return None
    return value


def _record_from(entry: Mapping[str, Any]) -> StepRecord:
    """Read the record that ``line`` wrote; what was not finite is None.

    Raises:
        KeyError, TypeError: it is no such line.
    """
    known = {f.name for f in fields(StepRecord)}
    figures = {key: value for key, value in entry.items() if key in known}
    return StepRecord(**{**figures, "bytes": Bytes(**entry["bytes"])})


def read_records(path: Path, after: int = 0) -> Iterator[StepRecord]:
    """Yield the steps of a ``metrics.jsonl`` that follow step ``after``, up to the first line that is cut short.

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
    """Drop the lines of steps after ``step`` (they will be run again) and a last line cut short by a crash.

    The records of the lines that stay are added to ``records``.
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
