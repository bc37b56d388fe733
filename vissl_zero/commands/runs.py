"""``vissl-zero runs [folder]``: the runs of a folder in one table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.launch.run_list import FIGURES, STATES, ListedRun, as_json, find_runs, listed
from vissl_zero.reporting.quantity import figure_text

USAGE = """\
vissl-zero runs [folder] [--state <state>] [--recipe <text>] [--sort <column>] [--json]
  folder            where to look, at any depth; runs by default
  --state <state>   running, waiting, stopped, failed or done
  --recipe <text>   recipes that contain it
  --sort <column>   age (newest first, default), folder, recipe, state, step, loss_last, top1, knn_top1_after,
                    images_per_s
  --json            a list of objects: folder, state, why, recipe, step, figures, age_s, resume
"""
_COLUMNS = ("age", "folder", "recipe", "state", "step", *FIGURES)
_NAMES = {"loss_last": "loss", "top1": "top-1", "knn_top1_after": "kNN top-1", "images_per_s": "images/s"}
_SHARES = ("top1", "knn_top1_after")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def runs(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        ConfigError: an unknown flag or value, or a folder that does not exist.
    """
    if {"-h", "--help"} & {*arguments}:
        print(USAGE, end="")
        return 0
    folder, options, is_json = _parse(arguments)
    found = [listed(path) for path in find_runs(folder)]
    found = [run for run in found if options["--state"] in ("", run.state) and options["--recipe"] in run.recipe]
    found.sort(key=lambda run: _order(run, options["--sort"] or "age"))
    if is_json:
        print(json.dumps([as_json(run) for run in found], indent=1))
    elif found:
        _print(found)
    else:
        print(f"No run in {folder}." if not any(options.values()) else f"No such run in {folder}.")
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Path, dict[str, str], bool]:
    allowed = {"--state": STATES, "--sort": _COLUMNS, "--recipe": ()}
    options, folders, is_json = dict.fromkeys(allowed, ""), [], False
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        word = words.pop(0)
        if word == "--json":
            is_json = True
        elif word in allowed:
            if not words or (allowed[word] and words[0] not in allowed[word]):
                must = f"must be {', '.join(allowed[word])}" if allowed[word] else "needs a value"
                raise ConfigError(
                    [Problem(f"vissl-zero runs {word}", words[0] if words else "nothing", must, "See --help.")]
                )
            options[word] = words.pop(0)
        elif word.startswith("-"):
            near = did_you_mean(word, [*allowed, "--json"])
            raise ConfigError(f"vissl-zero runs: {word} is not a flag.{near} See vissl-zero runs --help.")
        else:
            folders.append(Path(word).expanduser())
    folder = folders[0] if folders else Path("runs")
    if len(folders) > 1 or (folders and not folder.is_dir()):
        got = " ".join(map(str, folders))
        raise ConfigError([Problem("vissl-zero runs", got, "must be one folder that exists", "Correct the path.")])
    return folder, options, is_json


def _order(run: ListedRun, column: str) -> tuple[bool, float | str]:
    """Return the key to sort runs by; one that lacks the figure comes last."""
    if column in FIGURES:
        value = run.figures.get(column)
        return value is None, (value or 0.0) * (1 if column == "loss_last" else -1)
    return False, run.age_s if column == "age" else -run.step if column == "step" else str(getattr(run, column))


def _print(found: Sequence[ListedRun]) -> None:
    table = Table(box=None, pad_edge=False)
    shown = [name for name in FIGURES if any(name in run.figures for run in found)]
    for column in ("state", "step", *(_NAMES[name] for name in shown), "age", "recipe", "folder"):
        is_text = column in ("state", "recipe", "folder")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for run in found:
        figures = [_figure(name, run.figures.get(name)) for name in shown]
        table.add_row(*map(Text, (run.state, str(run.step), *figures, _age(run.age_s), run.recipe, run.folder)))
    console = Console(width=max(len(run.folder) + len(run.recipe) for run in found) + 90, soft_wrap=True)
    console.print(table)
    for run in found:
        if run.why and run.state in ("failed", "running", "waiting"):
            console.print(f"{run.state}: {run.folder}: {run.why}", markup=False, highlight=False)
        if run.resume:
            console.print(f"resume: {run.resume}", markup=False, highlight=False)


def _figure(name: str, value: float | None) -> str:
    return f"{100 * value:.1f} %" if name in _SHARES and value is not None else figure_text(value)


def _age(seconds: float) -> str:
    return next((f"{seconds / unit:.0f} {name}" for unit, name in _UNITS if seconds >= unit), f"{seconds:.0f} s")
