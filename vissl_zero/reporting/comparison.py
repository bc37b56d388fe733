"""The comparison of runs: the keys that differ, means over seeds with intervals, and an HTML page with curves."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from vissl_zero.engine.hook import Records
from vissl_zero.engine.stopping import read_summary
from vissl_zero.errors import counted, printable
from vissl_zero.reporting.metrics_file import FILE_NAME, read_records
from vissl_zero.reporting.quantity import bytes_text, result_text
from vissl_zero.resolve.saved import leaves, read_saved

# Key of summary.json -> its name in tables.
FIGURES = {
    "loss_last": "loss, last step",
    "top1": "top-1",
    "top5": "top-5",
    "miou": "mean IoU",
    "knn_top1_after": "kNN top-1",
    "probe_top1": "linear probe top-1",
    "rankme_after": "RankMe",
    "images_per_s": "images/s",
    "memory": "memory of a rank",
    "peak": "peak of the process",
}
_BYTES = ("memory", "peak")
# Keys that do not change an experiment.
_SEED = "SEED_VALUE"
_PLACES = ("CHECKPOINT.DIR", _SEED)
_HOOKS = "HOOKS."  # hooks watch a run, and do not change it
_MOST_KEYS, _LONGEST_NAME = 3, 60  # most keys in the name of a group, and its most characters
_LAST_NAME = re.compile(r".*\.(?=\D)")  # the path before the last name, DATA_SOURCES.0 for example
_RESAMPLES = 2000
_MOST_POINTS = 600
_PAGE = Path(__file__).with_name("comparison_page.html")


@dataclass(frozen=True)
class ComparedRun:
    """A run: its folder, recipe, flat configuration, curve of the loss as (step, loss), and results by name."""

    folder: Path
    recipe: str
    config: dict[str, Any]
    curve: list[tuple[int, float]]
    figures: dict[str, float]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    name: str
    runs: list[ComparedRun] = field(default_factory=list)

    @property
    def has_seeds(self) -> bool:
        """Whether the runs have different seeds. Repetitions with one seed say nothing about others."""
        return len({run.config.get(_SEED) for run in self.runs}) == len(self.runs) > 1

    @property
    def size(self) -> str:
        """The number of runs: "1 run", "2 runs", "2 seeds"."""
        return f"{len(self.runs)} seeds" if self.has_seeds else counted(len(self.runs), "run")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % bootstrap interval; no interval for one run."""

    mean: float
    low: float | None
    high: float | None


def read_run(folder: Path) -> ComparedRun:
    """Read a run from its folder.

    Raises:
        OSError, ValueError: its configuration or its metrics cannot be read.
    """
    saved = read_saved(folder / "config.resolved.yaml")
    config = dict(leaves(saved["config"]))
    records = Records(read_records(folder / FILE_NAME))
    curve = [(record.step, float(record.loss)) for record in records if record.loss is not None]
    # The page holds the points of all curves itself.
    curve = curve[:: max(1, -(-len(curve) // _MOST_POINTS))]
    summary = read_summary(folder)
    figures = {name: float(summary[name]) for name in FIGURES if isinstance(summary.get(name), int | float)}
    if isinstance(held := summary.get("bytes"), dict):
        figures["peak"] = float(held.get("peak", 0))
        figures["memory"] = float(sum(held.get(kind, 0) for kind in ("params", "grads", "optimizer", "activations")))
    if not summary and curve:
        figures["loss_last"] = curve[-1][1]
    return ComparedRun(folder, str(saved.get("recipe", "")), config, curve, figures)


def names_of(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the runs' paths below their common folder: names that differ even if the last parts are equal."""
    if not runs:
        return []
    folders = [str(run.folder.absolute()) for run in runs]
    # Of their parents, so that a single run still has a name.
    above = os.path.commonpath([os.path.dirname(folder) for folder in folders])  # noqa: PTH120 - of strings
    return [printable(os.path.relpath(folder, above)) for folder in folders]


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return each key whose values differ between runs, with the value of each run; None: the run lacks the key."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "CHECKPOINT.DIR")
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    # By ``repr``, because lists cannot be in a set, and because True equals 1.
    return {key: row for key, row in values.items() if len({repr(value) for value in row}) > 1}


def grouped(runs: Sequence[ComparedRun]) -> list[Group]:
    """Group runs that differ only in the seed; a group is named by the keys that differ, if few, else by its run."""
    keys = [key for key in differing(runs) if key not in _PLACES and not key.startswith(_HOOKS)]
    groups: dict[tuple[str, ...], Group] = {}
    for run, path in zip(runs, names_of(runs), strict=True):
        values = tuple(str(run.config.get(key)) for key in keys)
        named = zip(keys, values, strict=True)
        name = printable(", ".join(f"{_LAST_NAME.sub('', key)}={value}" for key, value in named))
        is_short = 0 < len(keys) <= _MOST_KEYS and len(name) <= _LONGEST_NAME
        groups.setdefault(values, Group(name if is_short else path)).runs.append(run)
    return list(groups.values())


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` and its percentile bootstrap interval (Efron 1979); the result is reproducible."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return Estimate(float(data.mean()), None, None)
    # A fixed seed, so that the same runs always give the same table.
    draws = np.random.default_rng(0).integers(0, len(data), (_RESAMPLES, len(data)))
    low, high = np.percentile(data[draws].mean(axis=1), [2.5, 97.5])
    return Estimate(float(data.mean()), float(low), float(high))


def _figures_of(group: Group) -> dict[str, Estimate]:
    """Return the mean of each result that all runs of the group have."""
    shared = [name for name in FIGURES if all(name in run.figures for run in group.runs)]
    means = {name: estimate([run.figures[name] for run in group.runs]) for name in shared}
    return means if group.has_seeds else {name: Estimate(of_runs.mean, None, None) for name, of_runs in means.items()}


def _parts(name: str, shown: Estimate | None) -> tuple[str, str]:
    """Format a mean and its interval; the interval is "" if it equals the mean after rounding."""
    if shown is None:
        return "-", ""
    mean = _text(name, shown.mean)
    if shown.low is None or shown.high is None:
        return mean, ""
    low, high = _text(name, shown.low), _text(name, shown.high)
    return mean, "" if low == mean == high else f"[{low}, {high}]"


def _text(name: str, value: float) -> str:
    return bytes_text(value) if name in _BYTES else result_text(name, value)


def rows_of(groups: Sequence[Group]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table of results: name of a result, and a cell for each group."""
    columns = [_figures_of(group) for group in groups]
    for name, title in FIGURES.items():
        if any(name in column for column in columns):
            yield title, [" ".join(filter(None, _parts(name, column.get(name)))) for column in columns]


def text_table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[object]]]) -> Table:
    """Return a table for a terminal: each row has a name, and a cell for each column after the first."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(Text(printable(column)), no_wrap=True)
    for name, cells in rows:
        table.add_row(Text(name), *(Text(printable(cell)) for cell in cells))
    return table


def page(runs: Sequence[ComparedRun]) -> str:
    """Return a self-contained HTML page, which loads nothing."""
    groups, names = grouped(runs), names_of(runs)
    name_of = {id(run): name for run, name in zip(runs, names, strict=True)}
    heads = [f"{group.name} ({group.size})" for group in groups]
    keys = [(key, [printable(value) for value in row]) for key, row in differing(runs).items()]
    data = {
        "groups": [
            {
                "name": head,
                "curves": [
                    {"name": _seed_name(run, name_of[id(run)], group), "points": run.curve}
                    for run in group.runs
                    if len(run.curve) > 1
                ],
            }
            for head, group in zip(heads, groups, strict=True)
        ]
    }
    are_seeds = any(group.has_seeds for group in groups)
    recipes = ", ".join(dict.fromkeys(run.recipe for run in runs if run.recipe))
    columns = [_figures_of(group) for group in groups]
    figures = [
        (title, [" ".join(_span(*_parts(name, column.get(name)))) for column in columns])
        for name, title in FIGURES.items()
        if any(name in column for column in columns)
    ]
    lines = "A line is the mean over seeds, its band their range." if are_seeds else ""
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        about="Mean over seeds; in brackets its 95 % bootstrap interval, where seeds differ." if are_seeds else "",
        figures=_table(["figure", *heads], figures),
        lines=lines,
        keys=_table(["key", *names], [(key, map(html.escape, row)) for key, row in keys])
        if keys
        else "<p>No key differs.</p>",
        reports="".join(map(_report, runs)),
        # "</script>" in a folder's name would end the element.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        title=html.escape(f"{f'{printable(recipes)}: ' if recipes else ''}{len(runs)} runs side by side"),
    )


def _seed_name(run: ComparedRun, name: str, group: Group) -> str:
    return f"seed {run.config.get(_SEED)}" if group.has_seeds else name


def _span(mean: str, interval: str) -> Iterator[str]:
    """Yield mean and interval as HTML elements that can break into two lines."""
    yield f"<span>{html.escape(mean)}</span>"
    if interval:
        yield f"<span class=interval>{html.escape(interval)}</span>"


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return an HTML table; cells are HTML, heads and names are escaped."""
    first = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows
    )
    return f"<div class=wide><table><tr>{first}</tr>{body}</table></div>"


def _report(run: ComparedRun) -> str:
    try:
        # Inside the page, so that it can be sent without its runs. One that was stopped has no picture.
        picture = base64.b64encode((run.folder / "report.png").read_bytes()).decode()
    except OSError:
        return ""
    name = html.escape(str(run.folder))
    image = f'<img alt="report of {name}" src="data:image/png;base64,{picture}">'
    return f"<details><summary>{name}</summary>{image}</details>"


def as_json(runs: Sequence[ComparedRun]) -> Mapping[str, Any]:
    """Return the comparison for JSON: differing keys by run, results by group."""
    return {
        "runs": [str(run.folder) for run in runs],
        "keys": differing(runs),
        "groups": groups_as_json(grouped(runs)),
    }


def groups_as_json(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the results of groups for JSON."""
    return [
        {
            "name": group.name,
            "runs": [str(run.folder) for run in group.runs],
            "figures": {name: vars(estimate) for name, estimate in _figures_of(group).items()},
        }
        for group in groups
    ]
