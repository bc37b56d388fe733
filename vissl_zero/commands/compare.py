"""``vissl-zero compare A B ...``: runs side by side, as a table and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vissl_zero.atomic import replacing
from vissl_zero.commands.arguments import CommandParser, output_file
from vissl_zero.errors import ConfigError, Problem, counted
from vissl_zero.launch.run_list import find_runs
from vissl_zero.terminal import print_line

_WORD = "vissl-zero compare"


def compare(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        ConfigError: an unknown flag, or folders that are no runs.
    """
    parser = CommandParser(prog=_WORD, description="Compare runs in a table, and on a page that needs no network.")
    parser.add_argument(
        "folders", nargs="+", metavar="folder", help="of a run, or of several (a sweep); seeds of one recipe are joined"
    )
    parser.add_argument(
        "--html", metavar="FILE", type=output_file, default=Path("comparison.html"), help="page to write"
    )
    parser.add_argument("--json", action="store_true", help="print data in place of the table")
    options = parser.parse_args(arguments)
    folders, out = _runs_of(options.folders), options.html
    from vissl_zero.reporting.comparison import (
        as_json,
        differing,
        grouped,
        names_of,
        page,
        read_run,
        rows_of,
        text_table,
    )

    try:
        runs = [read_run(folder) for folder in folders]
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(_WORD, str(error), "must name runs that can be read", "Leave it out.")]) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        temporary.write_text(page(runs), encoding="utf-8")
    if options.json:
        print(json.dumps(as_json(runs), indent=1))
        return 0
    # Wider than the terminal if need be: a wrapped table can be read, and Rich would crop figures.
    console = Console(width=max(Console().width, 40 + 60 * len(runs)), soft_wrap=True)
    console.print(text_table(["key", *names_of(runs)], differing(runs).items()))
    groups = grouped(runs)
    heads = [f"{group.name} ({len(group.runs)})" for group in groups]
    console.print(text_table(["figure", *heads], rows_of(groups)))
    print_line(f"page: {out}", console)
    return 0


def _runs_of(names: Sequence[str]) -> list[Path]:
    """Return the runs in the named folders."""
    folders: list[Path] = []
    for name in names:
        runs = list(find_runs(Path(name).expanduser()))
        if not runs:
            must = "must be the folder of a run, or of several"
            raise ConfigError([Problem(_WORD, name, must, "vissl-zero runs lists them.")])
        folders += runs
    # A run may be named twice, by itself and by a folder above.
    folders = list(dict.fromkeys(folders))
    if len(folders) < 2:
        raise ConfigError(
            [Problem(_WORD, counted(len(folders), "run"), "needs two runs at least", "Name two folders.")]
        )
    return folders
