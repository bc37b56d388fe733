"""Loops of one's own on a GPU: what they do between steps, and a momentum teacher, beside plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vissl_zero
from tests.dist import test_sharded_tensor as loops
from vissl_zero.integration.fit import forecaster_of
from vissl_zero.resolve.resolved import ShardingPlan

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


def test_fit_forecasts_a_function_written_for_the_gpu():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 30 * 30, 64)).cuda()
    x = torch.randn(16, 3, 32, 32, device=CUDA)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(x.to("cuda"))
        return (outputs.float() - torch.zeros(64, device="cuda")).square().mean()

    before = torch.cuda.memory_allocated() - sum(param.nbytes for param in model.parameters())
    forecaster, mode = forecaster_of(model, {"type": "AdamW"}, ShardingPlan(0), loss, CUDA)
    with mode:
        step = forecaster.forecast(ShardingPlan(0)).step
    assert step is not None
    chosen, optimizer = vissl_zero.initialize(model, {"type": "AdamW"}, {"level": "fit"}, sample=loss)
    for number in range(3):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.backward(loss(chosen))
        optimizer.step()
        optimizer.zero_grad()
    assert step.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.1)
