"""The first steps of the twins that need no repository (``benchmarks/twins.py``): methods beside lightly's code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vissl_zero.registry import METHODS

ROOT = Path(__file__).parents[3]
NUM_STEPS = 6


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("twins", ROOT / "benchmarks" / "twins.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["twins"] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


twins = _load()
OF_LIGHTLY = [twin for twin in twins.TWINS if not twin.repository]


@pytest.mark.filterwarnings("ignore")  # lightly's own
@pytest.mark.parametrize("twin", OF_LIGHTLY, ids=lambda twin: twin.method)
def test_a_method_trains_as_lightly_does(twin: object) -> None:
    assert twins.largest_difference(twin, {}, NUM_STEPS) < 1e-12


def test_the_page_has_every_twin() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    first, last = twins.MARKS
    rows = [row for row in page[page.index(first) : page.index(last)].splitlines() if row.startswith("| `")]
    assert [row.split("|")[1:3] for row in rows] == [
        [f" `{t.method}` ", f" {twins.peer_name(t)} "] for t in twins.TWINS
    ]
    assert all(float(row.split("|")[4]) <= 1e-9 for row in rows)
    assert {twin.method for twin in twins.TWINS} <= set(METHODS.builtin())
