"""Formatted numbers: bytes and durations as text, bars and sparklines for the terminal.

Also memory by kind, as tables, bars and files show it: names, order, peaks over a run, and values of all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, fields

import torch

from vissl_zero.collectives import all_gather_rows
from vissl_zero.engine.forecast_log import note_running
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.sharding.memory import Bytes, mapped_bytes, resident_bytes

_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_HEIGHTS = "▁▂▃▄▅▆▇█"


def bar(fraction: float, width: int) -> str:
    """Return a bar that fills ``fraction`` of ``width`` characters, to an eighth; at least one eighth above zero."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + _EIGHTHS[rest]


def sparkline(values: list[float], width: int) -> str:
    """Return values as a row of blocks, scaled from the lowest to the highest; "" for fewer than two values.

    Args:
        values: values, oldest first.
        width: most characters; with more values, each character is the mean of consecutive values.
    """
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_HEIGHTS[round((mean - low) / span * (len(_HEIGHTS) - 1))] for mean in means)


def bytes_text(num_bytes: float) -> str:
    """Format bytes as ``"1.50 MiB"``, with about three digits and powers of 1024.

    Args:
        num_bytes: number of bytes; may be negative (a difference).
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:  # 1,000, not 1,024: "1.00 MiB" reads better than "1023 KiB"
            return f"{_three_digits(value) if unit != 'B' else int(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def duration_text(seconds: float) -> str:
    """Format seconds as ``"12:34"`` (minutes, seconds), ``"3:05:09"`` (hours) or ``"2 d 3:05:09"``; NaN as ``"?"``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def figure_text(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits; None as ``"-"``."""
    return "-" if value is None else f"{value:.{digits}g}"


def result_text(name: str, value: float | None) -> str:
    """Format a result named ``name`` in a run's summary: shares in percent, others as ``figure_text``."""
    return f"{100 * value:.1f} %" if name in _SHARES and value is not None else figure_text(value)


_SHARES = ("top1", "top5", "miou", "knn_top1_after", "probe_top1")

# Kinds of a rank's memory, in the order of display. Two fields of Bytes are not part of the sum: ``peak`` is measured
# for the whole process (resident set size on the CPU, allocated on CUDA), so it includes code, data and caches;
# ``params_step_peak`` is the peak of ``params`` while units are gathered.
KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
    "teacher": "teacher",
}
_FIELDS = tuple(field.name for field in fields(Bytes))


def shown_kinds(*figures: Bytes) -> dict[str, str]:
    """Return ``KINDS``, without the teacher if no rank has bytes of a teacher."""
    has_teacher = any(memory.teacher for memory in figures)
    return {kind: name for kind, name in KINDS.items() if kind != "teacher" or has_teacher}


def total(memory: Bytes) -> int:
    """Sum the bytes of all kinds."""
    return sum(getattr(memory, kind) for kind in KINDS)


def largest(figures: Iterable[Bytes]) -> Bytes:
    """Return the maximum of each kind; zeros if ``figures`` is empty."""
    table = [asdict(memory) for memory in figures]
    return Bytes(**{name: max((row[name] for row in table), default=0) for name in _FIELDS})


def gather(memory: Bytes, device: torch.device) -> list[Bytes]:
    """Gather every rank's memory by kind, in rank order. Collective. Cost: one all-gather of a few numbers."""
    row = torch.tensor([list(asdict(memory).values())], dtype=torch.int64, device=device)
    return [Bytes(*figures) for figures in all_gather_rows(row).tolist()]


class PeakMemory(Hook):
    """Adds ``bytes_per_rank`` and ``bytes`` (the maximum over ranks of each kind) to the results.

    Cost: one all-gather of a few numbers at the end of the run.
    """

    def __init__(self) -> None:
        self._largest = self._newest = Bytes()

    def on_step(self, run: Run, step: Step) -> None:
        if step.bytes is not self._newest:  # a new measurement
            self._newest = step.bytes
            self._largest = largest((self._largest, step.bytes))

    def on_end(self, run: Run) -> None:
        recorded = (record.bytes for record in run.records)  # also before a resume; a long run keeps not all records
        per_rank = gather(largest((self._largest, *recorded)), run.device)
        run.results["bytes"] = asdict(largest(per_rank))
        run.results["bytes_per_rank"] = [asdict(memory) for memory in per_rank]


class FitMeasurement(Hook):
    """Writes the bytes of rank 0 that do not belong to the plan into the log of ``fit``, after the first step.

    Create this hook before the model is built.
    """

    def __init__(self, device: torch.device) -> None:
        is_cpu = device.type == "cpu"
        self.held_bytes = (resident_bytes() or 0) if is_cpu else 0
        self._mapped = mapped_bytes() if is_cpu else None
        self._is_noted = False

    def on_record(self, run: Run, record: StepRecord) -> None:
        if not self._is_noted and run.is_main:
            self._is_noted = True
            # Code that was loaded with the first step counts as resident too, and is not the plan's either.
            since = 0 if self._mapped is None else max(0, mapped_bytes() - self._mapped)
            note_running(run.folder, run.first_step, self.held_bytes + since)
