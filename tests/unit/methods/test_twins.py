"""The first steps of the twins that need no repository (``benchmarks/twins.py``): methods beside lightly's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_scripts import load_benchmark
from vissl_zero.registry import METHODS

ROOT = Path(__file__).parents[3]
NUM_STEPS = 6

twins = load_benchmark("twins")
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
