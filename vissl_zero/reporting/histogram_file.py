"""``histograms.jsonl``: histograms of weights and gradients with fixed buckets (``HOOKS.HISTOGRAMS_EVERY``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import rich
from rich.console import Console

from vissl_zero.atomic import as_object, replacing
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.reporting.lossy_output import optional_output
from vissl_zero.sharding.update.histograms import Histograms

FILE_NAME = "histograms.jsonl"
Counts = dict[str, dict[int, int]]  # tag -> bucket -> elements; empty buckets are left out


class HistogramFile(Hook):
    """Writes a line for each step that has histograms; a resumed run drops the lines of steps that it repeats."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or rich.get_console()

    def on_start(self, run: Run) -> None:
        path = run.folder / FILE_NAME
        if run.is_main and path.exists():
            with optional_output(FILE_NAME, self._console):
                kept = [(step, counts) for step, counts in read_histograms(path) if step <= run.step]
                # Through a temporary file: a kill must not lose the lines of earlier steps.
                with replacing(path) as temporary:
                    temporary.write_text("".join(_line(step, counts) for step, counts in kept), encoding="utf-8")

    def on_step(self, run: Run, step: Step) -> None:
        if run.is_main and run.histograms is not None:
            with (
                optional_output(FILE_NAME, self._console),
                (run.folder / FILE_NAME).open("a", encoding="utf-8") as file,
            ):
                file.write(_line(step.step, tagged(run.histograms)))


def tagged(histograms: Histograms) -> Counts:
    """Return the counts under the tags of loggers: ``weights/<name>``, ``gradients/<name>``."""
    counts: Counts = {}
    for kind, table in (("weights", histograms.weights), ("gradients", histograms.gradients)):
        rows = ({bucket: count for bucket, count in enumerate(row.tolist()) if count} for row in table)
        counts |= {f"{kind}/{name}": row for name, row in zip(histograms.names, rows, strict=True) if row}
    return counts


def _line(step: int, counts: Counts) -> str:
    return json.dumps({"step": step, "counts": counts}) + "\n"


def read_histograms(path: Path) -> Iterator[tuple[int, Counts]]:
    """Yield step and counts of each line, up to the first incomplete line."""
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                entry = as_object(text)
                tags = entry["counts"].items()
                yield int(entry["step"]), {tag: {int(place): n for place, n in row.items()} for tag, row in tags}
            except (ValueError, KeyError, TypeError, AttributeError):
                return
