"""The summary of a sweep: a table, ``sweep.csv`` and ``sweep.png`` over all jobs, including failed ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import rich
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import replacing
from vissl_zero.config.override_words import pairs_of
from vissl_zero.engine.stopping import is_done, read_jobs, read_note, read_summary
from vissl_zero.reporting.comparison import grouped, groups_as_json, read_run, rows_of, text_table
from vissl_zero.reporting.panels import BLUE, GREEN, KIND_COLORS, MARGIN, ORANGE, STYLE, VERMILLION, WIDTH, Page
from vissl_zero.reporting.quantity import KINDS, bytes_text, result_text, shown_kinds
from vissl_zero.sharding.memory import Bytes

CSV_NAME, PLOT_NAME, SEEDS_NAME = "sweep.csv", "sweep.png", "seeds.json"
_FIGURES = {
    "loss_last": "loss",
    "top1": "top-1",
    "miou": "mean IoU",
    "knn_top1_after": "kNN top-1",
    "images_per_s": "images/s",
}
_OPTIONAL = ("top1", "miou")
_PANEL_HEIGHT, _PANEL_STEP = 210, 330
_MOST_LABELS = 24


@dataclass(frozen=True)
class Row:
    """A job in the summary of its sweep.

    Attributes:
        name: name of the job's folder.
        values: swept key -> value as a string.
        state: "done", "failed (2)" with the exit code, or "not done".
        summary: summary of the run; empty if the run has not ended.
    """

    name: str
    values: dict[str, str]
    state: str
    summary: dict[str, Any]


def collect(sweep_dir: Path) -> list[Row]:
    """Return all jobs of a sweep folder in order, with the keys whose values differ between jobs."""
    pairs = {folder: pairs_of(note.overrides) for folder, note in read_jobs(sweep_dir).items()}
    keys = dict.fromkeys(key for values in pairs.values() for key in values)
    swept = [key for key in keys if len({values.get(key) for values in pairs.values()}) > 1]
    return [
        Row(folder.name, {key: values.get(key, "") for key in swept}, _state(folder), read_summary(folder))
        for folder, values in pairs.items()
    ]


def _state(folder: Path) -> str:
    note = read_note(folder)
    if is_done(folder):
        return "done"
    # Codes 75 and 130 are of runs that were asked to stop; they can go on.
    return "not done" if note is None or note.code in (None, 0, 75, 130) else f"failed ({note.code})"


def write_sweep(sweep_dir: Path, rows: Sequence[Row]) -> None:
    """Write the CSV and the plot. Cost: about a second."""
    columns = ["job", *(rows[0].values if rows else []), "state", *_FIGURES, *(f"{kind}_bytes" for kind in KINDS)]
    with replacing(sweep_dir / CSV_NAME) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            memory = row.summary.get("bytes", {})
            figures = [row.summary.get(name) for name in _FIGURES]
            kinds = [memory.get(kind) for kind in KINDS]
            writer.writerow([row.name, *row.values.values(), row.state, *figures, *kinds])
    with mpl.rc_context(STYLE), replacing(sweep_dir / PLOT_NAME) as temporary:
        _draw(rows).figure.savefig(temporary, format="png")


def print_sweep(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the table: a line per job."""
    out = console or rich.get_console()
    table = Table(box=None, pad_edge=False)
    swept = list(rows[0].values) if rows else []
    shown = shown_kinds(*(Bytes(teacher=row.summary.get("bytes", {}).get("teacher", 0)) for row in rows))
    measured = [name for name in _FIGURES if name not in _OPTIONAL or _is_measured(rows, name)]
    figures = [_FIGURES[name] for name in measured]
    for name in ("job", *(key.rpartition(".")[2] for key in swept), "state", *figures, *shown):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    for row in rows:
        summary, memory = row.summary, row.summary.get("bytes", {})
        figures = [result_text(name, summary.get(name)) for name in measured]
        kinds = (bytes_text(memory[kind]) if kind in memory else "-" for kind in shown)
        table.add_row(*map(Text, (row.name, *row.values.values(), row.state, *figures, *kinds)))
    # On a narrow terminal, lines wrap, because cropped columns are useless.
    wide = Console(file=out.file, width=max(out.width, 60 + 14 * (len(swept) + len(shown))), soft_wrap=True)
    wide.print(table)


def join_seeds(sweep_dir: Path, rows: Sequence[Row]) -> bool:
    """Print each result's mean over seeds with its 95 % bootstrap interval, and write these as JSON.

    Args:
        sweep_dir: folder of the jobs.
        rows: all jobs; only completed jobs are used.
    Returns:
        Whether there are jobs that differ only in their seed.
    """
    groups = grouped([read_run(sweep_dir / row.name) for row in rows if row.state == "done"])
    groups = [group for group in groups if group.has_seeds]
    if not groups:
        return False
    with replacing(sweep_dir / SEEDS_NAME) as temporary:
        temporary.write_text(json.dumps(groups_as_json(groups), indent=1), encoding="utf-8")
    heads = [f"{group.name if len(groups) > 1 else ''} {group.size}".strip() for group in groups]
    table = text_table(["mean over seeds", *heads], rows_of(groups))
    out = rich.get_console()
    out.print()
    Console(file=out.file, width=max(out.width, 30 + 40 * len(groups)), soft_wrap=True).print(table)
    return True


def _is_measured(rows: Sequence[Row], name: str) -> bool:
    return any(row.summary.get(name) is not None for row in rows)


def _draw(rows: Sequence[Row]) -> Page:
    page = Page(90 + 2 * _PANEL_STEP + 40)
    page.text(MARGIN, 30, "Sweep", size=20, bold=True)
    done = sum(row.state == "done" for row in rows)
    swept = ", ".join(rows[0].values) if rows else ""
    page.text(MARGIN + 110, 36, f"{done} of {len(rows)} jobs done; over {swept or 'nothing'}", size=11)
    half = (WIDTH - 2 * MARGIN - 70) / 2
    accuracy = next((name for name in _OPTIONAL if _is_measured(rows, name)), "knn_top1_after")
    panels: list[tuple[str, Callable[[Row], Any], str]] = [
        ("Loss, last step", lambda row: row.summary.get("loss_last"), BLUE),
        (_FIGURES[accuracy], lambda row: row.summary.get(accuracy), GREEN),
        ("Images per second", lambda row: row.summary.get("images_per_s"), ORANGE),
    ]
    for index in range(4):
        left = MARGIN + 56 + (index % 2) * (half + 70)
        axes = page.axes(left, 90 + (index // 2) * _PANEL_STEP + 24, half - 56, _PANEL_HEIGHT)
        if index < len(panels):
            title, figure, color = panels[index]
            axes.set_title(title)
            values = [figure(row) for row in rows]
            shown = [(place, value) for place, value in enumerate(values) if value is not None]
            # matplotlib would label near values by their distance from a number above the axis.
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.plot([place for place, _ in shown], [value for _, value in shown], "o", color=color, markersize=7)
        else:
            _draw_memory(axes, rows)
        _mark(axes, rows)
    return page


def _draw_memory(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("Memory per rank, MiB")
    bottoms = [0.0] * len(rows)
    for kind, name in KINDS.items():
        heights = [row.summary.get("bytes", {}).get(kind, 0) / 2**20 for row in rows]
        axes.bar(range(len(rows)), heights, bottom=bottoms, color=KIND_COLORS[kind], label=name, width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.legend(fontsize=8.5, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _mark(axes: Axes, rows: Sequence[Row]) -> None:
    """Label the jobs by their values, and cross out jobs without a result."""
    labels = [" ".join(row.values.values()) or row.name for row in rows]
    every = max(1, -(-len(rows) // _MOST_LABELS))
    slanted = max(map(len, labels), default=0) > 6
    axes.set_xticks(
        range(0, len(rows), every),
        [label[:28] for label in labels[::every]],
        rotation=35 if slanted else 0,
        ha="right" if slanted else "center",
        fontsize=9,
    )
    axes.set_xlim(-0.7, len(rows) - 0.3)
    missing = [place for place, row in enumerate(rows) if row.state != "done"]
    axes.plot(missing, [0.03] * len(missing), "x", color=VERMILLION, transform=axes.get_xaxis_transform())
