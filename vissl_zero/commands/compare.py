"""``vissl-zero compare A B ...``: runs side by side, as a table and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import replacing
from vissl_zero.errors import ConfigError, Problem, did_you_mean, printable
from vissl_zero.launch.run_list import find_runs

USAGE = """\
vissl-zero compare <folder> <folder> ... [--html <file>] [--json]
  folder          of a run, or of several (a sweep); seeds of one recipe are joined
  --html <file>   the page, comparison.html by default; it needs no network
  --json          print data instead of the table
"""
_WORD = "vissl-zero compare"


def compare(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        ConfigError: an unknown flag, or folders that are no runs.
    """
    if {"-h", "--help"} & {*arguments}:
        print(USAGE, end="")
        return 0
    folders, out, is_json = _parse(arguments)
    from vissl_zero.reporting.comparison import as_json, differing, grouped, page, read_run, rows_of

    try:
        runs = [read_run(folder) for folder in folders]
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(_WORD, str(error), "must name runs that can be read", "Leave it out.")]) from error
    with replacing(out) as temporary:
        temporary.write_text(page(runs), encoding="utf-8")
    if is_json:
        print(json.dumps(as_json(runs), indent=1))
        return 0
    console = Console(width=max(Console().width, 40 + 60 * len(runs)), soft_wrap=True)
    console.print(_table(["key", *(run.folder.name for run in runs)], list(differing(runs).items())))
    groups = grouped(runs)
    heads = [f"{group.name} ({len(group.runs)})" for group in groups]
    console.print(_table(["figure", *heads], list(rows_of(groups))))
    console.print(f"page: {out}", markup=False, highlight=False)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[list[Path], Path, bool]:
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    folders: list[Path] = []
    out, is_json = Path("comparison.html"), False
    while words:
        word = words.pop(0)
        if word == "--json":
            is_json = True
        elif word == "--html" and words:
            out = Path(words.pop(0)).expanduser()
        elif word.startswith("-"):
            near = did_you_mean(word, ["--html", "--json"])
            raise ConfigError(f"{_WORD}: {word} is not a flag, or lacks a value.{near} See {_WORD} --help.")
        else:
            found = list(find_runs(Path(word).expanduser()))
            if not found:
                must = "must be the folder of a run, or of several"
                raise ConfigError([Problem(_WORD, word, must, "vissl-zero runs lists them.")])
            folders += found
    if len(folders) < 2:
        raise ConfigError([Problem(_WORD, f"{len(folders)} runs", "needs two runs at least", "Name two folders.")])
    return list(dict.fromkeys(folders)), out, is_json


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[object]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(Text(printable(head)), no_wrap=True)
    for name, cells in rows:
        table.add_row(Text(name), *(Text(printable(cell)) for cell in cells))
    return table
