"""The strategy without a process group, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.errors import ConfigError, VisslZeroError
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import UpdateRule
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan
from vissl_zero.sharding.engines.torch.strategy import _refuse_hooked
from vissl_zero.sharding.engines.torch.unit_guard import _Forward, _save_or_refuse
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.strategy import update_rule_of


def _shard(**settings: Any) -> tuple[nn.Linear, ShardedModel]:
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


def test_an_untrained_model_holds_parameters_and_buffers() -> None:
    model, plan = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), ShardingPlan(level=0)
    group = ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, False, 0.0)
    strategy = STRATEGIES.get("torch").build()
    sharded = strategy.shard(model, [group], lambda groups: (torch.optim.SGD(groups), None), plan, torch.device("cpu"))
    assert sharded.held_bytes() == 4 * (3 * 2 + 2 + 2 + 2) + 4 * (2 + 2) + 8  # running statistics, and their count


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


def _normalized_sgd(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    """As a plugin may register it in OPTIMIZERS: it divides each gradient by its norm."""

    class Normalized(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad /= param.grad.norm()
            super().step(closure)

    return Normalized(groups, momentum=0.9), None


def _row_normalized_sgd(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    class Rows(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.dim() > 1:
                        param.grad /= param.grad.norm(dim=1, keepdim=True)
            super().step(closure)

    return Rows(groups, momentum=0.9), None


ON_DISK = OffloadPlan("nvme", nvme_path="/nowhere")


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (ShardingPlan(level=1), UpdateRule.ELEMENT_WISE),
        (ShardingPlan(level=3), UpdateRule.ELEMENT_WISE),
        (ShardingPlan(level=1, engine="fairscale"), UpdateRule.ELEMENT_WISE),
        (ShardingPlan(level=1, offload_optimizer=ON_DISK), UpdateRule.PER_TENSOR),
        (ShardingPlan(level=3, offload_params=ON_DISK), UpdateRule.PER_TENSOR),
    ],
)
def test_an_optimizer_that_looks_at_rows_gets_them_where_shards_are_rows(plan: ShardingPlan, rule: UpdateRule) -> None:
    """fairscale's level 3 flattens parameters, and what is on a disk is streamed in runs of elements."""
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    assert update_rule_of(_row_normalized_sgd, nn.Linear(5, 4), [group], plan) is rule


def test_fairscales_flat_parameters_have_no_rows() -> None:
    group, plan = ParamGroup("all", ("weight", "bias"), False, False, 0.0), ShardingPlan(level=3, engine="fairscale")
    with pytest.raises(ConfigError, match="cannot go with the fairscale engine"):
        update_rule_of(_row_normalized_sgd, nn.Linear(5, 4), [group], plan)


def test_what_cannot_give_an_optimizer_whole_tensors_is_refused_before_the_model_is_touched() -> None:
    model = nn.Linear(3, 2)
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    before = dict(model.named_parameters())
    plan = ShardingPlan(level=1, engine="fairscale")
    with pytest.raises(ConfigError, match="cannot go with the fairscale engine"):
        STRATEGIES.get(plan.engine).build().shard(model, [group], _normalized_sgd, plan, torch.device("cpu"))
    assert all(param is before[name] for name, param in model.named_parameters())
    assert type(model) is nn.Linear


def _globally_normalized_sgd(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    class Coupled(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            params = [param for group in self.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, 1.0)
            super().step(closure)

    return Coupled(groups, momentum=0.9), None


@pytest.mark.parametrize("engine", ["torch", "fairscale"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_optimizer_that_couples_tensors_is_refused(engine: str, level: int) -> None:
    """As a plugin may register it in OPTIMIZERS: nobody but the strategy sees every optimizer."""
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    plan = ShardingPlan(level=level, engine=engine)
    with pytest.raises(ConfigError, match="must update each tensor"):
        strategy = STRATEGIES.get(engine).build()
        strategy.shard(nn.Linear(3, 2), [group], _globally_normalized_sgd, plan, torch.device("cpu"))


def test_level_0_takes_any_optimizer() -> None:
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    strategy = STRATEGIES.get("torch").build()
    strategy.shard(nn.Linear(3, 2), [group], _normalized_sgd, ShardingPlan(level=0), torch.device("cpu"))


def test_a_hook_on_a_parameter_is_refused_where_it_would_never_run() -> None:
    model = nn.Linear(3, 2)
    model.bias.register_hook(lambda grad: grad * 0)
    with pytest.raises(ConfigError, match=r"got bias has a hook|bias has a hook"):
        _refuse_hooked(model)
    _refuse_hooked(nn.Linear(3, 2))


def test_a_pass_that_is_looked_at_and_not_differentiated_leaves_nothing_behind() -> None:
    """Outputs that a layer saves would hold the node that holds them, until the garbage collector runs."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
    forward = _Forward(module, SimpleNamespace(is_sharded=False), nullcontext)  # type: ignore[arg-type]
    gc.disable()
    try:
        output = forward(torch.randn(2, 4))
        alive = weakref.ref(output)
        del output
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("words", [((), {"state_dict": {}}), (("folder", {}), {})])
def test_a_library_saves_a_state_that_it_is_given_and_no_shards(words: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = words
    assert _save_or_refuse(lambda *args, **kwargs: (args, kwargs), *args, **kwargs) == words
    with pytest.raises(VisslZeroError, match=r"model\.save_pretrained\(folder, state_dict=state\)"):
        _save_or_refuse(print, "folder", safe=True)
