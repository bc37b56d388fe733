"""Pages of docs/ of which a module writes the tables."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest


def require_written_again(module: str, pages: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that the module writes the rows of its tables that are left out of a copy of the pages.

    Args:
        module: what ``python -m`` takes.
        pages: page of docs/ -> what a written row has in it.
        folder: an empty one, for the copy.
        monkeypatch: pytest's.
    """
    docs = Path(__file__).parents[1] / "docs"
    (folder / "docs").mkdir()
    for page, row in pages.items():
        text = (docs / page).read_text()
        kept = [line for line in text.split("\n") if not (line.startswith("| `") and row in line)]
        assert len(kept) < len(text.split("\n"))
        (folder / "docs" / page).write_text("\n".join(kept))
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__")
    for page in pages:
        assert (folder / "docs" / page).read_text() == (docs / page).read_text()
