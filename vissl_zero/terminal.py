"""Lines of text on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich

from vissl_zero.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def print_line(text: str, console: Console | None = None) -> None:
    """Print ``text`` as it is: without rich's markup, colors and line breaks, and with control characters escaped."""
    (console or rich.get_console()).print(printable(text), markup=False, highlight=False, soft_wrap=True)
