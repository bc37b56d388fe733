"""Bytes on the wire per step, counted, over those of DistributedDataParallel: 1.0, 1.0 and 1.5, multi-crop included."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.test_memory import _shard, _Stack
from tests.ranks import run_on_ranks
from vissl_zero.models.keyed_random import refuse_unkeyed_randomness
from vissl_zero.sharding.sharded_model import ShardedModel


class _Traffic(TorchDispatchMode):
    """Bytes a rank sends in ring algorithms, by operation of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            hops = (dist.get_world_size() - 1) / dist.get_world_size()
            self.calls[name] += 1
            if name == "c10d::_allgather_base_":  # of batch norm; units travel by the communicator
                self.sent["statistics"] += round(args[0].nbytes * hops)
            elif name == "c10d::_reduce_scatter_base_":
                self.sent["gradients"] += round(args[1].nbytes * hops)
            elif name == "c10d::allgather_":
                self.sent["statistics"] += sum(t.nbytes for t in args[1]) * (dist.get_world_size() - 1)
            elif name == "c10d::allreduce_":
                self.sent["statistics"] += round(2 * sum(t.nbytes for t in args[0]) * hops)
            else:
                raise AssertionError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def _step(sharded: ShardedModel, num_resolutions: int, num_micro_batches: int, has_teacher: bool = False) -> None:
    for index in range(num_micro_batches):
        with sharded.micro_batch(is_last=index == num_micro_batches - 1):
            crops = [torch.randn(4 - resolution, 33) for resolution in range(num_resolutions)]
            wanted: torch.Tensor | float = 0.0
            if has_teacher:
                with torch.no_grad():
                    wanted = sharded.teacher(crops)
            sharded.backward((sharded.model(crops) - wanted).square().mean())
    sharded.step()
    if has_teacher:
        sharded.follow(0.9)
    sharded.zero_grad()


def _bytes_per_step(
    level: int, num_resolutions: int, num_micro_batches: int, has_teacher: bool = False
) -> dict[str, float]:
    sharded = _shard(level, "sgd")
    if has_teacher:
        torch.manual_seed(0)
        sharded.adopt_teacher(_Stack())
    means = getattr(sharded, "means", None)
    _step(sharded, num_resolutions, num_micro_batches, has_teacher)
    sent_before = means.sent_bytes if means else 0
    comms = [getattr(model, "comm", None) for model in (sharded, getattr(sharded, "_teacher", None))]
    counters = [comm.sent_bytes for comm in comms if comm]
    for counter in counters:
        counter.clear()
    with _Traffic() as traffic:
        _step(sharded, num_resolutions, num_micro_batches, has_teacher)
    sent = sum(counters, traffic.sent.copy())
    averaged = means.sent_bytes - sent_before if means else 0
    state = averaged + sent["parameters"] + sent["gradients"]
    statistics = traffic.sent["statistics"] - averaged
    return {"state": state, "statistics": statistics, "all_reduces": traffic.calls["c10d::allreduce_"]}


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("num_resolutions", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_over_ddp(world_size: int, num_resolutions: int) -> None:
    ddp, *levels = (run_on_ranks(world_size, _bytes_per_step, level, num_resolutions, 1)[0] for level in range(4))
    ratios = [level["state"] / ddp["state"] for level in levels]
    print(f"world {world_size}, {num_resolutions} resolutions: levels 1 to 3 move {ratios} of DDP's bytes")
    assert ratios == pytest.approx([1.0, 1.0, 1.5], rel=0.01)
    assert all(level["statistics"] < 0.03 * ddp["state"] for level in levels)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_teachers_own_forward_pass_is_one_more_gathering_of_units_at_level_3_and_nothing_elsewhere() -> None:
    """Following is free. Level 3: 1.5 times DDP's bytes for the student, .5 for the teacher's forward pass."""
    ddp, *levels = (run_on_ranks(3, _bytes_per_step, level, 2, 1, True)[0] for level in range(4))
    assert ddp["state"] == run_on_ranks(3, _bytes_per_step, 0, 2, 1)[0]["state"]
    assert [level["state"] / ddp["state"] for level in levels] == pytest.approx([1.0, 1.0, 1.5 + 0.5], rel=0.02)


@pytest.mark.timeout(60)
def test_level_1_communicates_once_a_step_however_many_micro_batches() -> None:
    once, thrice = (run_on_ranks(2, _bytes_per_step, 1, 2, number)[0] for number in (1, 3))
    assert thrice["state"] == once["state"]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_norms_take_one_all_reduce() -> None:
    # Four batch norms, two resolutions each: one all-reduce in backward per call. One for all norms of the step, and
    # one for the facts in which ranks must not differ.
    assert run_on_ranks(2, _bytes_per_step, 3, 2, 1)[0]["all_reduces"] == 4 * 2 + 1 + 1


class _SharedRelu(nn.Module):
    """Blocks, which are units, with one ReLU for all of them, as classy-vision builds RegNets; or with one each."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        one = nn.ReLU()
        relus = [one if is_shared else nn.ReLU() for _ in range(4)]
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), relu) for relu in relus))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _sent_after_watching(is_shared: bool) -> tuple[int, int]:
    """Bytes of gathers in the second step, after one whose modules were watched by hooks; hooks left then."""
    torch.manual_seed(0)
    sharded = _shard(3, "sgd", _SharedRelu(is_shared))
    inputs = torch.randn(4, 32)
    for is_first in (True, False):
        sharded.comm.sent_bytes.clear()
        with sharded.micro_batch(is_last=True):
            with refuse_unkeyed_randomness(sharded.model) if is_first else nullcontext():
                loss = sharded.model(inputs).square().mean()
            sharded.backward(loss)
        sharded.step()
        sharded.zero_grad()
    num_hooks = sum(len(module._forward_hooks) for module in sharded.model.modules() if isinstance(module, nn.ReLU))
    return sharded.comm.sent_bytes["parameters"], num_hooks


@pytest.mark.timeout(60)
def test_units_that_share_a_module_are_gathered_no_more_often_than_others() -> None:
    shared, apart = (run_on_ranks(2, _sent_after_watching, is_shared)[0] for is_shared in (True, False))
    assert shared == apart and shared[1] == 0
