"""``benchmarks/public_models.py``: public models in, out and in again, and that a difference ends it with 1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmark_scripts import load_benchmark

ROOT = Path(__file__).parents[3]

public_models = load_benchmark("public_models")


@pytest.mark.parametrize("name", ["transformers convnextv2", "dinov2, 4 registers, by hand"])
def test_a_model_comes_out_as_it_went_in(tmp_path, name):
    row = public_models.check(name, public_models.MODELS[name], tmp_path)
    assert row.has_same_bits and not row.reason
    assert all(float(cell.split()[1]) < 1e-5 for cell in row.differences), row.differences


def test_a_difference_is_named_and_ends_with_1(monkeypatch, capsys):
    assert len(public_models.MODELS) >= 40
    monkeypatch.setattr(sys, "argv", ["public_models.py", "mae by hand"])
    monkeypatch.setattr(public_models, "TOLERANCE", -1.0)
    assert public_models.main() == 1
    said = capsys.readouterr().out
    assert "1 models, 0 pass" in said and "mae by hand: features ours at 32 pixels" in said
