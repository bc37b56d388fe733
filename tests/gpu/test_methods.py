"""Every method on a GPU at level 3 has the losses that it has on the CPU at level 0, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.runs import losses

RECIPES = sorted(
    path.stem for path in Path("configs/config/digits").glob("*.yaml") if path.stem not in ("base", "patches", "views")
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_the_cpu(recipe, tmp_path):
    words = ["config.TRAINER.MAX_STEPS=4", "config.TRAINER.DTYPE=float64"]
    expected = losses(tmp_path / "cpu", f"digits/{recipe}", *words, "config.ZERO.LEVEL=0", device="cpu")
    found = losses(tmp_path / "gpu", f"digits/{recipe}", *words, "config.ZERO.LEVEL=3")
    assert found == pytest.approx(expected, rel=1e-9)
