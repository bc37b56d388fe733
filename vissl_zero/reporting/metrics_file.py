"""``metrics.jsonl``: one JSON object per optimizer step, for scripts and notebooks. Keys: ``docs/run_folder.md``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.atomic import replacing

FILE_NAME = "metrics.jsonl"


class MetricsFile(Hook):
    """Writes a line per step as soon as the step is done (0.1 ms), so that a crash loses none."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        path = run.folder / FILE_NAME
        if path.exists():
            _forget_after(path, run.step)
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, run: Run, record: StepRecord) -> None:
        if self._file is not None:
            self._file.write(line(record) + "\n")
            self._file.flush()

    def close(self, run: Run) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def line(record: StepRecord) -> str:
    """One step as strict JSON on one line; floats keep every digit (``repr``).

    JSON has no NaN and no infinity: such a figure is null, and ``not_finite`` holds its name and what it was.
    """
    flat = asdict(record)
    not_finite: dict[str, str] = {}
    entry = _finite(flat, "", not_finite)
    if not_finite:
        entry["not_finite"] = not_finite
    return json.dumps(entry, allow_nan=False)


def _finite(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    """``value`` with None for every NaN or infinity in it, each noted in ``not_finite`` under its dotted name."""
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}" if name else key, not_finite) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[name] = repr(value)
        return None
    return value


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step`` (they will be run again) and a last line cut short by a crash."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(text)
        except json.JSONDecodeError:
            break
        if entry["step"] <= step:
            kept.append(text + "\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
