"""The strategy without a process group, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.config.resolved import Precision, ShardingPlan
from vissl_zero.errors import ConfigError, VisslZeroError
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.strategy import Sharded


def _shard(**settings: Any) -> tuple[nn.Linear, Sharded]:
    model = nn.Linear(3, 2)
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    strategy = STRATEGIES.get("torch").build()
    build = lambda groups: (torch.optim.SGD(groups), None)  # noqa: E731
    return model, strategy.shard(model, [group], build, ShardingPlan(**settings), torch.device("cpu"))


def test_one_process_trains_without_a_process_group() -> None:
    model, sharded = _shard(level=0)
    before = model.weight.detach().clone()
    assert sharded.optimizer.param_groups[0]["name"] == "all"
    sharded.optimizer.param_groups[0]["lr"] = 0.5
    x = torch.randn(4, 3)
    with sharded.micro_batch(is_last=True):
        sharded.backward(sharded.model(x).sum(), weight=2.0)
    assert sharded.ledger().grads == 4 * 8
    result = sharded.step()
    sharded.zero_grad()
    torch.testing.assert_close(model.weight, before - 0.5 * 2 * x.sum(0))
    expected = torch.cat([2 * x.sum(0).expand(2, 3).flatten(), torch.full((2,), 8.0)]).norm()
    torch.testing.assert_close(result.grad_norm, expected)
    assert sharded.ledger().grads == 0
    assert sharded.full_state().keys() == {"weight", "bias"}


def test_sharding_without_a_process_group_says_so() -> None:
    with pytest.raises(VisslZeroError, match="ZeRO level 3 needs a process group"):
        _shard(level=3)


@pytest.mark.parametrize("precision", [Precision(compute="bfloat16"), Precision(reduce="float16")])
def test_level_0_in_half_precision_parameters_is_refused_with_an_alternative(precision: Precision) -> None:
    with pytest.raises(ConfigError, match=r"must be float32 at ZeRO level 0.*Set config.MODEL.AMP_PARAMS.USE_AMP=true"):
        _shard(level=0, precision=precision)


def test_the_master_precision_is_the_models() -> None:
    model, _ = _shard(level=0, precision=Precision(master="float64", compute="float64", reduce="float64"))
    assert model.weight.dtype == torch.float64
