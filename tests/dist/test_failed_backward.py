"""A loop that catches an error of the backward pass, such as out of memory, and goes on as level 0 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vissl_zero
from tests.ranks import RankError, run_on_ranks

FAILED_STEP = 2


class _Fails(torch.autograd.Function):
    is_on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if _Fails.is_on:
            raise MemoryError("out of memory")
        return grad


class _Block(nn.Module):
    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.is_recomputed = nn.Linear(8, 8), nn.LayerNorm(8), is_recomputed

    def layers(self, x: Tensor) -> Tensor:
        return self.norm(x + _Fails.apply(self.linear(x)).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.is_recomputed else self.layers(x)


def _losses(zero: dict[str, Any], is_recomputed: bool, frees: bool = True) -> list[float]:
    torch.manual_seed(0)
    dtype = torch.float32 if "bf16" in zero else torch.float64
    model = nn.Sequential(*[_Block(is_recomputed) for _ in range(3)], nn.Linear(8, 2)).to(dtype)
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.5}, zero)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(6):
        _Fails.is_on = step == FAILED_STEP
        loss = (model(torch.randn(16, 8, generator=generator, dtype=dtype)) - 1).square().mean()
        losses.append(float(loss.detach()))
        try:
            optimizer.backward(loss)
            optimizer.step()
        except MemoryError:
            if not frees:
                continue
        optimizer.zero_grad()
    optimizer.close()
    return losses


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(("zero", "world_size"), [({"level": 2}, 2), ({"level": 3}, 2), ({"level": 3}, 1)])
def test_the_next_steps_are_those_of_level_0(zero: dict[str, Any], world_size: int, is_recomputed: bool) -> None:
    expected = run_on_ranks(world_size, _losses, {"level": 0}, is_recomputed)[0]
    assert expected[-1] < 0.2 * expected[0]
    assert run_on_ranks(world_size, _losses, zero, is_recomputed)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_so_they_are_in_half_precision(level: int) -> None:
    expected = run_on_ranks(2, _losses, {"level": 0, "bf16": True}, False)[0]
    assert run_on_ranks(2, _losses, {"level": level, "bf16": True}, False)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.timeout(60)
def test_so_they_are_with_all_state_on_a_disk(tmp_path: Path) -> None:
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"level": 3, "offload_optimizer_config": tier, "offload_param_config": tier}
    expected = run_on_ranks(2, _losses, {"level": 0}, False)[0]
    assert run_on_ranks(2, _losses, zero, False)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.timeout(60)
def test_an_update_with_what_is_left_of_the_pass_is_refused() -> None:
    with pytest.raises(RankError, match=r"A backward pass raised, and its gradients are incomplete\. Call opt"):
        run_on_ranks(2, _losses, {"level": 3}, False, False)
