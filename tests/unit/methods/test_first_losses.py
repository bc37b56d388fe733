"""The first losses of every method, written down: parity compares a method with itself, and would not see it change.

A commit that changes a number on purpose writes them again: ``python -m tests.unit.methods.test_first_losses``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.test_method_parity import CASES, plain

PAGE = Path(__file__).with_name("first_losses.json")
FIRST = json.loads(PAGE.read_text()) if PAGE.exists() else {}


def _numbers(method: str) -> dict[str, float]:
    """Four losses, the figures of the last step, and what all weights and all state of the loss add up to."""
    result = plain(method, "batch")
    totals = {"weights": 0.0, "teacher": 0.0, "loss": 0.0}
    for name, tensor in result.state.items():
        kind = name.partition(":")[0]
        totals[kind if kind in totals else "weights"] += float(tensor.double().abs().sum())
    losses = {f"loss {step}": loss for step, loss in enumerate(result.losses)}
    figures = {f"figure {name}": value for name, value in result.figures.items()}
    return losses | figures | {f"sum of {name}": total for name, total in totals.items()}


@pytest.mark.parametrize("method", CASES)
def test_a_method_learns_as_it_did(method: str) -> None:
    assert _numbers(method) == pytest.approx(FIRST[method], rel=1e-8, abs=1e-9)


if __name__ == "__main__":
    PAGE.write_text(json.dumps({method: _numbers(method) for method in CASES}, indent=1) + "\n")
