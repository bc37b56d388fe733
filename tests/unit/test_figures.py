"""Figures that stand on several pages are equal there, and equal to what the code or the benchmark's table holds.

``docs/figures.json`` has each: its value, where it is from, the command that repeats it, a pattern that finds it on
any page (the groups, joined, are the value), and the pages that must have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_parity import NOISE_FLOOR, RUN, TOLERANCE
from vissl_zero.registry import METHODS

ROOT = Path(__file__).parents[2]
FIGURES: list[dict[str, Any]] = json.loads((ROOT / "docs/figures.json").read_text())
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
}


def contradictions(figure: Mapping[str, Any], pages: Mapping[str, str]) -> list[str]:
    found = {
        name: ["".join(match.groups()) for match in re.finditer(figure["pattern"], text)]
        for name, text in pages.items()
    }
    missing = [f"{name} lacks {figure['name']}" for name in figure["pages"] if not found[name]]
    wrong = [f"{name}: {value}" for name, values in found.items() for value in values if value != figure["value"]]
    return missing + wrong


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["name"])
def test_pages_have_the_figure_of_the_source(figure):
    assert not contradictions(figure, PAGES)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["name"])
def test_a_changed_page_is_found(figure):
    page = figure["pages"][0]
    changed = re.sub(figure["pattern"], lambda match: re.sub(r"\d(?=\D*$)", "x", match[0]), PAGES[page])
    assert contradictions(figure, {**PAGES, page: changed})


def test_figures_of_the_code_are_those_of_the_code():
    values = {figure["name"]: figure["value"] for figure in FIGURES}
    assert values["parity cells"] == str(len(RUN))
    assert float(values["noise floor of the references"]) == NOISE_FLOOR
    assert float(values["tolerance of parity"]) == TOLERANCE
    assert values["methods"] == str(len(list(METHODS)))


def step_costs() -> dict[str, tuple[str, str]]:
    """Read ``model, system -> time, peak memory`` (DDP = 1) from the first two tables of benchmarks/step_cost.md."""
    text = PAGES["benchmarks/step_cost.md"].split("Ratios of times of one round")[0]
    costs = {}
    for model, table in zip(("MLP", "RegNet"), text.split("RegNetY-400MF (64x64"), strict=True):
        for line in re.findall(r"^\| [123] \| .*$", table, re.MULTILINE):
            system, _, time, *_, peak = (cell.strip() for cell in line.strip("| ").split(" | ")[1:])
            costs[f"{model} {system}"] = time.split()[0], peak.split()[0]
    return costs


ROWS = {
    "vissl_zero, level 1, 2, 3": [f"vissl_zero level {level}" for level in (1, 2, 3)],
    "torch `fully_shard`, without and with reshard": ["fully_shard, no reshard", "fully_shard"],
    "fairscale OSS, ShardedDDP": ["fairscale OSS + DDP", "fairscale ShardedDDP"],
}


@pytest.mark.parametrize("row", ROWS)
def test_the_readme_has_the_step_costs_of_the_benchmark(row):
    costs = step_costs()
    cells = [
        ", ".join(costs[f"{model} {system}"][which] for system in ROWS[row])
        for model in ("MLP", "RegNet")
        for which in (0, 1)
    ]
    assert f"| {row} | {' | '.join(cells)} |" in PAGES["README.md"]


def test_the_comparison_has_the_step_costs_of_the_benchmark():
    times = ", ".join(step_costs()[f"MLP vissl_zero level {level}"][0] for level in (1, 2, 3))
    assert f"DDP = 1 | {times} ([table]" in PAGES["docs/comparison.md"]
