"""Loops of one's own on a GPU: what they do between steps, and a momentum teacher, beside plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import test_sharded_tensor as loops

CUDA = torch.device("cuda", 0)
ON_CPU = {"device": "cpu"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "DEVICE", CUDA)


@pytest.mark.parametrize(
    "zero",
    [
        *({"level": level} for level in range(4)),
        {"level": 3, "offload_optimizer_config": ON_CPU},
        {"level": 3, "offload_param_config": ON_CPU, "offload_optimizer_config": ON_CPU},
    ],
    ids=str,
)
def test_what_a_loop_does_between_steps_is_what_plain_torch_does(zero: dict[str, Any]):
    gaps = loops._gaps(zero)
    assert {name for name, gap in gaps.items() if not gap < 1e-10} == set(), gaps


@pytest.mark.parametrize("by_dict", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_teacher_is_sharded_moved_saved_and_loaded_with_the_model(level, by_dict, tmp_path):
    assert max(loops._teacher_gap(level, str(tmp_path), by_dict)) < 1e-10
