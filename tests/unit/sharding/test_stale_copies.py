"""Levels 1 and 2 of fully_shard leave units gathered after an evaluation: no later pass computes with stale copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

from tests.memory_store import MemoryStore
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.engines.torch import fully_sharded
from vissl_zero.sharding.sharded_model import ShardedModel

X = torch.arange(6.0).view(2, 3)
HALF = Precision("float32", None, "bfloat16", "float32", use_loss_scale=False)


def _sgd(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.SGD(groups, momentum=0.9), None


def _schedule_free(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    optimizer = AdamWScheduleFree(groups, lr=0.1)
    optimizer.train()
    return optimizer, None


Build = Callable[[list[dict[str, Any]]], tuple[torch.optim.Optimizer, None]]


def _sharded(build: Build = _sgd) -> ShardedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = [ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, True, 0.0)]
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


def _backward(sharded: ShardedModel) -> None:
    sharded.model.train()
    with sharded.micro_batch(is_last=True):
        sharded.backward(sharded.model(X).square().sum())


def _train(sharded: ShardedModel) -> None:
    _backward(sharded)
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


@pytest.mark.parametrize("is_on_host", [False, True])
def test_weights_for_evaluation_are_computed_with_and_given_back(
    is_on_host: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a schedule-free optimizer: here the mean of all weights so far, which its first steps change the most."""
    # On a GPU, the optimizer's copies are on the host where its state is.
    monkeypatch.setattr(fully_sharded, "needs_host_shards", lambda plan, device: is_on_host)
    sharded = _sharded(_schedule_free)
    for _ in range(3):
        _train(sharded)
    (trained, _), weights = _outputs(sharded), _stored(sharded).tensors
    with sharded.evaluated():
        (evaluated, _), means = _outputs(sharded), _stored(sharded).tensors
        use_means = _by_store(sharded)
    moved = {name for name, values in weights.items() if not torch.equal(values, means[name])}
    # A bias before batch norm has no gradient.
    assert moved == {f"model/{name}" for name, _ in sharded.named_parameters()} - {"model/0.bias"}
    assert torch.equal(_outputs(sharded)[0], trained)
    assert all(torch.equal(values, weights[name]) for name, values in _stored(sharded).tensors.items())
    use_means()
    assert torch.equal(_outputs(sharded)[0], evaluated) and not torch.equal(evaluated, trained)


def _plain_state() -> dict[str, Any]:
    """Return the state of plain torch's optimizer after a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer, _ = _schedule_free([{"params": list(model.parameters())}])
    model(X).square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def _within(context: Callable[[ShardedModel], AbstractContextManager[None]]) -> Callable[[ShardedModel], Any]:
    def enter(sharded: ShardedModel) -> Any:
        with context(sharded):
            return _stored(sharded).tensors

    return enter


CHANGES: dict[str, Callable[[ShardedModel], Any]] = {
    "step": ShardedModel.step,
    "follow": lambda sharded: sharded.follow(0.5),
    "average": lambda sharded: sharded.average(0.5),
    "averaged": _within(ShardedModel.averaged),
    "evaluated": _within(ShardedModel.evaluated),
    "normalize": lambda sharded: sharded.normalize_rows(["2.weight"]),
    "plain state": lambda sharded: sharded.load_state_dict(_plain_state()),
}


def _require_read_before(sharded: ShardedModel, change: Callable[[ShardedModel], Any]) -> None:
    before, seen = _stored(sharded).tensors, []
    sharded.before_next_change(lambda: seen.append(_stored(sharded).tensors))
    after = change(sharded)
    after = after if isinstance(after, dict) else _stored(sharded).tensors
    (read,) = seen
    assert all(torch.equal(values, read[name]) for name, values in before.items())
    assert not all(torch.equal(values, after[name]) for name, values in before.items())
    change(sharded)
    assert len(seen) == 1


def _ready(build: Build) -> ShardedModel:
    """Return a model with an average, a teacher that has not followed yet, and gradients for a step."""
    sharded = _sharded(build)
    for _ in range(2):
        _train(sharded)
        sharded.average(0.5)
    _backward(sharded)
    sharded.step()
    sharded.zero_grad()
    _backward(sharded)
    return sharded


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_is_written_before_what_it_reads_changes(change: str, group: dist.ProcessGroup) -> None:
    _require_read_before(_ready(_schedule_free), CHANGES[change])


@pytest.mark.parametrize("way", [_by_state_dict, _by_store])
def test_a_checkpoint_is_written_before_another_is_restored(
    way: Callable[[ShardedModel], Callable[[], object]], group: dist.ProcessGroup
) -> None:
    sharded = _ready(_sgd)
    go_back = way(sharded)
    sharded.step()
    _require_read_before(sharded, lambda _: go_back())
