"""``vissl-zero list <kind>``: recipes and components, a sentence each; recipes' names for the shell's completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.config.recipes import list_recipes, recipe_names
from vissl_zero.errors import ConfigError, did_you_mean
from vissl_zero.registry import REGISTRIES, load_plugins


def completed_recipes(arguments: Sequence[str]) -> list[str]:
    """List completions of ``config=...`` at the cursor, for ``-sc query=<shell>``; empty for other queries.

    The shell's script sets ``COMP_LINE``, the line up to the cursor.
    """
    if not any(word.startswith("query=") for word in arguments):
        return []
    word = os.environ.get("COMP_LINE", "").rpartition(" ")[2]
    if not word.startswith("config="):
        return []
    return [f"config={name}" for name in recipe_names() if f"config={name}".startswith(word)]


KINDS = ("recipes", *REGISTRIES)


def list_kind(kind: str, folders: Sequence[str]) -> int:
    """Print everything of one kind by name, including components of installed plugins.

    Args:
        kind: one of ``KINDS``.
        folders: more folders with recipes (--config-dir).
    Raises:
        ConfigError: ``kind`` is unknown.
    """
    if kind not in KINDS:
        command = f"vissl-zero list {kind}".rstrip()
        raise ConfigError(f"{command}: must be one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if kind == "recipes":
        _print((recipe.argument, recipe.summary) for recipe in list_recipes(folders))
    else:
        # A plugin that cannot be imported must not hide the components of the others.
        for broken in load_plugins([]):
            print(broken, file=sys.stderr)
        registry = REGISTRIES[kind]
        _print((name, registry.summary(name)) for name in registry)
    return 0


def _print(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets in a sentence are no markup
    # In a pipe, a sentence stays on its line: `vissl-zero list recipes | grep photos`.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
