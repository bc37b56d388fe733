"""``vissl-zero runs [folder]``: the runs of a folder in one table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.commands.arguments import CommandParser
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.launch.run_list import FIGURES, STATES, ListedRun, as_json, find_runs, listed
from vissl_zero.reporting.quantity import result_text
from vissl_zero.terminal import print_line

_COLUMNS = ("age", "folder", "recipe", "state", "step", *FIGURES)
_NAMES = {"loss_last": "loss", "top1": "top-1", "knn_top1_after": "kNN top-1", "images_per_s": "images/s"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def runs(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        ConfigError: an unknown flag or value, or a folder that does not exist.
    """
    parser = CommandParser(
        prog="vissl-zero runs", description="Print a table of runs, with the command that resumes each."
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where to look, at any depth (runs)")
    parser.add_argument("--state", choices=STATES, help="runs in this state")
    parser.add_argument("--recipe", metavar="TEXT", default="", help="recipes that contain it")
    parser.add_argument("--sort", choices=_COLUMNS, default="age", help="column; newest first by default")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list of objects: folder, state, why, recipe, step, figures, age_s, resume",
    )
    options = parser.parse_args(arguments)
    folder = (options.folder or Path("runs")).expanduser()
    if options.folder and not folder.is_dir():
        raise ConfigError(
            [Problem("vissl-zero runs", str(folder), "must be one folder that exists", "Correct the path.")]
        )
    listed_runs = [listed(path) for path in find_runs(folder)]
    listed_runs = [run for run in listed_runs if options.state in (None, run.state) and options.recipe in run.recipe]
    listed_runs.sort(key=lambda run: _order(run, options.sort))
    if options.json:
        print(json.dumps([as_json(run) for run in listed_runs], indent=1))
    elif listed_runs:
        _print(listed_runs)
    else:
        print(f"No{' such' if options.state or options.recipe else ''} run in {folder}.")
    return 0


def _order(run: ListedRun, column: str) -> tuple[bool, float | str]:
    """Return the sort key of a run; runs without a value in the column are last."""
    if column in FIGURES:
        value = run.figures.get(column)
        # The best run first. Of all figures, only the loss is better if lower.
        return value is None, (value or 0.0) * (1 if column == "loss_last" else -1)
    return False, run.age_s if column == "age" else -run.step if column == "step" else str(getattr(run, column))


def _print(listed_runs: Sequence[ListedRun]) -> None:
    table = Table(box=None, pad_edge=False)
    shown = [name for name in FIGURES if any(name in run.figures for run in listed_runs)]
    for column in ("state", "step", *(_NAMES[name] for name in shown), "age", "recipe", "folder"):
        is_text = column in ("state", "recipe", "folder")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for run in listed_runs:
        figures = [result_text(name, run.figures.get(name)) for name in shown]
        table.add_row(*map(Text, (run.state, str(run.step), *figures, _age(run.age_s), run.recipe, run.folder)))
    console = Console(width=max(len(run.folder) + len(run.recipe) for run in listed_runs) + 90, soft_wrap=True)
    console.print(table)
    for run in listed_runs:
        if run.why and run.state in ("failed", "running", "waiting"):
            print_line(f"{run.state}: {run.folder}: {run.why}", console)
        if run.resume:
            print_line(f"resume: {run.resume}", console)


def _age(seconds: float) -> str:
    return next((f"{seconds / unit:.0f} {name}" for unit, name in _UNITS if seconds >= unit), f"{seconds:.0f} s")
