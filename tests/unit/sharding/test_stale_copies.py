"""Levels 1 and 2 of fully_shard leave units gathered after an evaluation: no later pass computes with stale copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.memory_store import MemoryStore
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.sharded_model import ShardedModel

X = torch.arange(6.0).view(2, 3)
HALF = Precision("float32", None, "bfloat16", "float32", use_loss_scale=False)


def _sharded() -> ShardedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = [ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, True, 0.0)]
    build: Any = lambda groups: (torch.optim.SGD(groups, momentum=0.9), None)  # noqa: E731
    sharded = (
        STRATEGIES.get("torch")
        .build()
        .shard(model, groups, build, ShardingPlan(level=1, precision=HALF), torch.device("cpu"))
    )
    sharded.adopt_teacher(copy.deepcopy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))
    sharded.optimizer.param_groups[0]["lr"] = 0.1
    return sharded


def _outputs(sharded: ShardedModel) -> tuple[Tensor, Tensor]:
    """Both pass in evaluation, which leaves their units gathered."""
    sharded.model.eval()
    with torch.no_grad():
        return sharded.model(X), sharded.teacher.eval()(X)


def _train(sharded: ShardedModel) -> None:
    sharded.model.train()
    with sharded.micro_batch(is_last=True):
        sharded.backward(sharded.model(X).square().sum())
    sharded.step()
    sharded.zero_grad()
    sharded.follow(0.0)


def _stored(sharded: ShardedModel) -> MemoryStore:
    store = MemoryStore()
    for part in sharded.parts():
        store.store(part.name, tuple(part.full_shape), part.first_element, part.read().clone())
    store.numbers = sharded.scalars()
    return store


def _by_state_dict(sharded: ShardedModel) -> Callable[[], object]:
    state = copy.deepcopy(sharded.state_dict())
    return lambda: sharded.load_state_dict(state)


def _by_store(sharded: ShardedModel) -> Callable[[], object]:
    store, buffers = _stored(sharded), copy.deepcopy(sharded.buffers())

    def restore() -> None:
        sharded.restore(store)
        for name, buffer in sharded.buffers().items():
            buffer.copy_(buffers[name])

    return restore


@pytest.mark.parametrize("way", [_by_state_dict, _by_store])
def test_a_restored_model_computes_with_what_was_restored(
    way: Callable[[ShardedModel], Callable[[], object]], group: dist.ProcessGroup
) -> None:
    sharded = _sharded()
    _train(sharded)
    go_back, before = way(sharded), _outputs(sharded)
    _train(sharded)
    after = _outputs(sharded)
    assert not any(map(torch.equal, before, after))
    go_back()
    assert all(map(torch.equal, before, _outputs(sharded)))
    _train(sharded)
    assert all(map(torch.equal, after, _outputs(sharded)))


def test_averaged_weights_and_normalized_rows_are_computed_with(group: dist.ProcessGroup) -> None:
    sharded = _sharded()
    _train(sharded)
    sharded.average(0.0)
    averaged, _ = _outputs(sharded)
    _train(sharded)
    trained, _ = _outputs(sharded)
    with sharded.averaged():
        assert torch.equal(_outputs(sharded)[0], averaged)
    assert torch.equal(_outputs(sharded)[0], trained)
    sharded.normalize_rows(["2.weight"])
    normalized, _ = _outputs(sharded)
    assert not torch.equal(normalized, trained)
    torch.testing.assert_close(dict(sharded.named_parameters())["2.weight"].norm(dim=1), torch.ones(2))


def test_the_teacher_computes_with_what_it_followed(group: dist.ProcessGroup) -> None:
    sharded = _sharded()
    before = _outputs(sharded)[1]
    _train(sharded)
    after = _outputs(sharded)[1]
    sharded.load_state_dict(sharded.state_dict())  # gathers anew
    assert torch.equal(_outputs(sharded)[1], after) and not torch.equal(before, after)
