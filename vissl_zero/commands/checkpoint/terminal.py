"""Arguments, tables and texts of ``vissl-zero checkpoint``; text of a file reaches the terminal as plain text only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.weights import WeightsFile, open_store
from vissl_zero.errors import ConfigError, printable


def console() -> Console:
    """Where to print: as wide as the terminal, or as the text in a file or pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200, soft_wrap=False)


def table(rows: Iterable[Sequence[object]], titles: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Print rows in columns.

    Args:
        rows: cells; anything.
        titles: of the columns; none: no header.
        right: columns to align to the right.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    result = Table(box=None, pad_edge=False, show_header=bool(titles))
    for index in range(max((len(row) for row in cells), default=len(titles))):
        title = titles[index] if index < len(titles) else ""
        result.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in cells:
        result.add_row(*map(Text, row))
    console().print(result)


def say(text: object, style: str = "") -> None:
    """Print one line of text, whatever is in it."""
    console().print(Text(printable(text), style=style))


def opened(path: str) -> Checkpoint | WeightsFile:
    """What ``path`` names, after saying which newer checkpoints do not open."""
    passed_over: list[str] = []
    store = open_store(path, passed_over)
    for reason in passed_over:
        say(f"passed over: {reason}")
    return store


class Parser(argparse.ArgumentParser):
    """Arguments of one word; what is wrong with them is one sentence."""

    def __init__(self, word: str, description: str):
        super().__init__(
            prog=f"vissl-zero checkpoint {word}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise ConfigError(f"{self.prog}: {message}. {self.prog} --help says what it takes.")
