"""A rank's state as one dict, and the state of plain torch: what is saved comes back, and nothing else is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.errors import CheckpointError
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.state.rank_state import load_rank_state, load_torch_state, rank_state
from vissl_zero.sharding.state.shard import Shard, whole_shard
from vissl_zero.sharding.state.teacher import WeightAverage

PLAN = ShardingPlan(0)
Optimizer = Callable[[list[Any]], torch.optim.Optimizer]


class _Rank:
    """A rank that holds all of a model, after two steps."""

    def __init__(self, build: Optimizer = torch.optim.AdamW, seed: int = 0, scale: LossScale | None = None):
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        self.shards: dict[str, Shard] = {name: whole_shard(name, p) for name, p in self.model.named_parameters()}
        params = list(self.model.parameters())
        self.optimizer = build([{"params": params[:1], "lr": 0.1 + seed}, {"params": params[1:], "lr": 0.2}])
        self.buffers = {"mean": torch.full((2,), float(seed))}
        self.scale = scale
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape)
            self.optimizer.step()

    def save(self, plan: ShardingPlan = PLAN) -> dict[str, Any]:
        return rank_state(plan, self.shards, self.optimizer, self.buffers, self.scale)

    def load(self, state: dict[str, Any]) -> None:
        load_rank_state(state, PLAN, self.shards, self.optimizer, self.buffers, self.scale)


def _plain(state: Any) -> Any:
    """Tensors as lists, to be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda groups: torch.optim.SGD(groups, momentum=0.9)])
def test_what_a_rank_saves_comes_back(build: Optimizer) -> None:
    first = _Rank(build, scale=LossScale(8.0, good_steps=3))
    second = _Rank(build, seed=1, scale=LossScale())
    saved = copy.deepcopy(first.save())
    assert saved["loss_scale"] == {"scale": 8.0, "good_steps": 3}
    assert saved["params"]["weight"]["full_shape"] == (2, 3) and saved["params"]["weight"]["first_element"] == 0
    second.load(saved)
    assert _plain(second.save()) == _plain(saved)
    assert second.optimizer.param_groups[0]["lr"] == 0.1
    kept = _plain(saved)
    for rank in (first, second):
        for param in rank.model.parameters():
            param.grad = torch.ones_like(param)
        rank.optimizer.step()
    assert _plain(saved) == kept, "copied: it may be loaded again"
    assert _plain(first.save()) == _plain(second.save())


def test_what_had_no_state_when_it_was_saved_has_none_after() -> None:
    saved, rank = _Rank().save(), _Rank(seed=1)
    rank.load(_change(saved, "optimizer", "state", "bias"))
    assert list(rank.optimizer.state) == [rank.model.weight]


def test_a_fused_sgd_gets_the_momentum_that_was_not_saved() -> None:
    def build(groups: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, 0.1, momentum=0.9, fused=True)

    rank = _Rank(build, seed=1)
    rank.load(_change(_Rank(build).save(), "optimizer", "state", "bias"))
    assert not rank.optimizer.state[rank.model.bias]["momentum_buffer"].any()


def test_a_running_average_is_saved_with_its_place() -> None:
    rank = _Rank()
    average = WeightAverage(rank.shards.values(), rank.buffers)
    saved = rank_state(PLAN, rank.shards, rank.optimizer, rank.buffers, None, average)["average"]
    assert saved["params"]["weight"]["local"] is average.params["weight"]
    assert saved["params"]["weight"]["full_shape"] == (2, 3) and saved["buffers"]["mean"] is average.buffers["mean"]
    later = WeightAverage(_Rank(seed=1).shards.values(), rank.buffers)
    later.load(saved["params"], saved["buffers"])
    assert torch.equal(later.params["weight"], average.params["weight"])


def test_a_saved_state_holds_the_memory_of_the_run() -> None:
    rank = _Rank()
    state = rank.save()
    assert state["loss_scale"] is state["average"] is None
    assert state["params"]["bias"]["local"].data_ptr() == rank.model.bias.data_ptr()
    assert state["buffers"]["mean"] is rank.buffers["mean"]


def _change(state: dict[str, Any], *path: Any, value: Any = None) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("layout", "level"), 3, r"another layout: level 3 \(here 0\)\. Resume with the same settings"),
        (("layout", "rank"), 1, r"another layout: rank 1 \(here 0\)"),
        (("layout", "world_size"), 4, r"another layout: world_size 4 \(here 1\)"),
        (("layout", "shard_group_size"), None, r"another layout: shard_group_size None \(here 1\)"),
        (("params", "bias"), None, "bias"),
        (("params", "more"), 1, "more"),
        (("buffers", "mean"), None, "mean"),
        (("params", "bias", "full_shape"), (3,), r"bias has shape \(3,\) in the saved state and \(2,\) here"),
        (("optimizer", "groups", 0, "params"), ["bias"], "groups parameters differently"),
        (("optimizer", "state", "bias", "exp_avg"), None, "another optimizer: of bias it holds .*, and not exp_avg"),
        (("optimizer", "groups", 1, "betas"), None, "its groups have no betas"),
        (("optimizer", "groups", 1, "decoupled_weight_decay"), False, "one of Adam and AdamW, and this is the other"),
        (("loss_scale",), {"scale": 2.0, "good_steps": 0}, "differ in loss scaling"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(path: Any, value: Any, sentence: str) -> None:
    saved, rank = _Rank().save(), _Rank(seed=1)
    before = _plain(copy.deepcopy(rank.save()))
    with pytest.raises(CheckpointError, match=sentence):
        rank.load(_change(saved, *path, value=value))
    assert _plain(rank.save()) == before


def test_state_of_plain_torch_is_taken_by_number() -> None:
    plain, rank = _Rank(), _Rank(seed=1)
    before = [param.detach().clone() for param in rank.model.parameters()]
    state = plain.optimizer.state_dict()
    state["param_groups"][0]["name"] = "theirs"
    load_torch_state(state, rank.shards, rank.optimizer)
    assert all(map(torch.equal, rank.model.parameters(), before))
    for (name, param), theirs in zip(rank.model.named_parameters(), plain.model.parameters(), strict=True):
        assert _plain(rank.optimizer.state[param]) == _plain(plain.optimizer.state[theirs]), name
        assert rank.optimizer.state[param]["exp_avg"] is not plain.optimizer.state[theirs]["exp_avg"]
        assert rank.optimizer.state[param]["step"] is not plain.optimizer.state[theirs]["step"]
    assert [group["lr"] for group in rank.optimizer.param_groups] == [0.1, 0.2]
    assert (
        rank.optimizer.param_groups[0]["params"] == [rank.model.weight] and "name" not in rank.optimizer.param_groups[0]
    )


def test_a_rank_takes_its_own_elements_of_plain_torchs_state() -> None:
    plain, rows = _Rank(), nn.Parameter(torch.zeros(1, 3))
    bias = nn.Parameter(torch.zeros(2))
    shards = {"weight": Shard("weight", rows, rows, torch.Size((2, 3)), 3), "bias": whole_shard("bias", bias)}
    optimizer = torch.optim.AdamW([{"params": [rows]}, {"params": [bias]}])
    state = plain.optimizer.state_dict()
    load_torch_state(state, shards, optimizer)
    assert torch.equal(optimizer.state[rows]["exp_avg"], state["state"][0]["exp_avg"][1:])
    assert torch.equal(optimizer.state[rows]["exp_avg_sq"], state["state"][0]["exp_avg_sq"][1:])
    assert float(optimizer.state[rows]["step"]) == 2.0


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_takes_its_own_elements_of_state_that_one_group_alone_keeps(first: int) -> None:
    def options(index: int) -> dict[str, Any]:
        return {"momentum": 0.9 * (index == first)}

    whole = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))]
    plain = torch.optim.SGD([{"params": [param], **options(index)} for index, param in enumerate(whole)], lr=0.1)
    for param in whole:
        param.grad = torch.arange(6.0).view(2, 3)
    plain.step()
    rows = [nn.Parameter(torch.zeros(1, 3)) for _ in whole]
    shards = {name: Shard(name, row, row, torch.Size((2, 3)), 3) for name, row in zip("ab", rows, strict=True)}
    sharded = torch.optim.SGD([{"params": [row], **options(index)} for index, row in enumerate(rows)], lr=0.1)
    load_torch_state(plain.state_dict(), shards, sharded)
    assert sharded.state[rows[first]]["momentum_buffer"].tolist() == [[3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("param_groups", 0, "params"), [0, 1], r"groups of \[2, 1\] parameters, this one of \[1, 1\]"),
        (("state", 0, "exp_avg"), None, "of weight it holds .*, and not exp_avg"),
        (("state", 0, "exp_avg"), torch.zeros(3), r"'exp_avg' of weight has shape \(3,\) in the saved optimizer, and"),
        (("param_groups", 0, "betas"), None, "its groups have no betas"),
    ],
)
def test_state_of_plain_torch_that_does_not_fit_is_refused(path: Any, value: Any, sentence: str) -> None:
    rank = _Rank(seed=1)
    before = _plain(copy.deepcopy(rank.save()))
    with pytest.raises(CheckpointError, match=sentence):
        load_torch_state(_change(_Rank().optimizer.state_dict(), *path, value=value), rank.shards, rank.optimizer)
    assert _plain(rank.save()) == before


def test_a_fused_sgd_gets_the_momentum_that_plain_torch_lacks() -> None:
    """Plain torch writes none for a parameter without gradient; fused kernels refuse a group where one lacks it."""

    def build(groups: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, 0.1, momentum=0.9, fused=True)

    rank = _Rank(build, seed=1)
    load_torch_state(_change(_Rank(build).optimizer.state_dict(), "state", 1), rank.shards, rank.optimizer)
    assert not rank.optimizer.state[rank.model.bias]["momentum_buffer"].any()


def test_a_parameter_without_state_in_plain_torch_has_none() -> None:
    rank = _Rank(seed=1)
    load_torch_state(_change(_Rank().optimizer.state_dict(), "state", 1), rank.shards, rank.optimizer)
    assert list(rank.optimizer.state) == [rank.model.weight]
