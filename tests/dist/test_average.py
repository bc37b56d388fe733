"""The running average of the weights: saved with the rest, restored, swapped in and out; shard groups that time out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.test_behaviour import _copied
from tests.dist.training import Case, Outcome, shard, train_step
from tests.memory_store import MemoryStore
from tests.ranks import RankError, run_on_ranks
from vissl_zero.errors import VisslZeroError

CASE = Case(optimizer="adamw", norm="group")


def _average(sharded: Any) -> dict[str, Tensor]:
    with sharded.averaged():
        return sharded.full_state()


def _save_and_resume(engine: str, level: int) -> dict[str, Any]:
    first = shard(CASE, level, engine=engine)
    with pytest.raises(RuntimeError, match="no running average yet"), first.averaged():
        pass
    assert first.state_dict()["average"] is None
    before = first.ledger().buffers
    for step in range(3):
        train_step(first, CASE, step, Outcome())
        first.average(0.5 if step else 0.0)
        if step == 1:
            saved = _copied(first.state_dict())
    second = shard(CASE, level, engine=engine)
    second.load_state_dict(saved)
    train_step(second, CASE, 2, Outcome())
    second.average(0.5)
    weights = first.full_state()
    inside = _average(first)
    after = first.full_state()
    return {
        "resumed": (_average(second), inside),
        "untouched": (after, weights),
        "moved": (inside, weights),
        "bytes": first.ledger().buffers - before,
        "held": sum(tensor.nbytes for _, tensor in first.named_parameters()),
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("engine", "level"), [("torch", 0), ("torch", 3), ("fairscale", 2)])
def test_the_average_resumes_and_leaves_the_weights_alone(engine: str, level: int) -> None:
    answers = run_on_ranks(2, _save_and_resume, engine, level)
    for name, tensor in answers[0]["resumed"][0].items():
        torch.testing.assert_close(tensor, answers[0]["resumed"][1][name], rtol=0, atol=1e-13)
        assert torch.equal(answers[0]["untouched"][0][name], answers[0]["untouched"][1][name])
    assert any(not torch.equal(tensor, answers[0]["moved"][1][name]) for name, tensor in answers[0]["moved"][0].items())
    for answer in answers:
        assert answer["bytes"] == answer["held"]  # one copy of what the rank holds


class _Stored(MemoryStore):
    """What all ranks store of a sharded model; every rank must make one."""

    def __init__(self, sharded: Any):
        super().__init__()
        parts = [(p.name, tuple(p.full_shape), p.first_element, p.read().clone()) for p in sharded.parts()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (parts, sharded.scalars()))
        for of_rank, numbers in everyone:
            self.numbers |= numbers
            for part in of_rank:
                self.store(*part)


def _store_and_restore(first_level: int, second_level: int) -> dict[str, Any]:
    first, second = shard(CASE, first_level), shard(CASE, second_level)
    for step in range(2):
        train_step(first, CASE, step, Outcome())
        first.average(0.5 if step else 0.0)
    assert not any(name.startswith("average:") for name in second.buffers())
    second.restore(_Stored(first))
    assert first.buffers().keys() == second.buffers().keys()
    for sharded in (first, second):
        train_step(sharded, CASE, 2, Outcome())
        sharded.average(0.5)
    return {"weights": (first.full_state(), second.full_state()), "averages": (_average(first), _average(second))}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("first_level", "second_level"), [(3, 1), (2, 3)])
def test_a_checkpoint_has_it_for_every_level(first_level: int, second_level: int) -> None:
    for ours, other in run_on_ranks(3, _store_and_restore, first_level, second_level)[0].values():
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-13)


_LATE_S = 16.0  # far beyond the timeout of 3 s, also on a busy machine


def _raise_alone() -> None:
    case = Case(norm="none")
    sharded = shard(case, 3, shard_group_size=2, timeout_s=3.0)
    train_step(sharded, case, 0, Outcome())
    started = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(_LATE_S)
        raise ValueError("rank 3 alone")
    try:
        for unit in sharded._units:  # type: ignore[attr-defined]
            unit.unshard()  # in the group of this rank only: the world's timeout does not help
            unit.reshard()
    except (RuntimeError, VisslZeroError) as error:  # the second names the call that waited, after 5 s
        raise AssertionError(f"gave up after {time.monotonic() - started:.0f} s") from error
    time.sleep(_LATE_S)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_shard_group_has_the_timeout_of_the_run() -> None:
    """Rank 2 waits for rank 3 in a group of their own."""
    with pytest.raises(RankError, match=r"gave up after ([3-9]|1[0-2]) s"):
        run_on_ranks(4, _raise_alone, timeout_s=30, group_timeout_s=30)
