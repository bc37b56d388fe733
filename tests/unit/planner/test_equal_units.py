"""A run of equal units is recorded at its ends: the trace is that of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vissl_zero.models.model import Unit
from vissl_zero.planner.equal_units import recorded
from vissl_zero.planner.forecast import fake_
from vissl_zero.planner.step_trace import StepTrace, record_step
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.wrap_plan import plan_wrap


class Counted(nn.Module):
    def __init__(self, calls: list[int]):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 8), nn.Linear(8, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x + self.second(torch.relu(self.first(x)))


class Trunk(nn.Module):
    def __init__(self, calls: list[int], kept: int | None):
        super().__init__()
        self.blocks = nn.ModuleList(Unit(Counted(calls)) for _ in range(9))
        self.head, self.kept = nn.Linear(4, 2), kept

    def forward(self, xs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        caught: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            xs = block(xs)
            if index == self.kept:
                caught = xs
        return torch.cat([self.head(x) for x in xs]).square().mean(), caught


def what_matters(trace: StepTrace) -> tuple[object, ...]:
    """Of storages that go at the same moment, the order does not."""
    cuts = {mark.place for mark in trace.marks}
    deltas: list[list[int]] = []
    for place, delta in enumerate(trace.deltas):
        if delta > 0 or place in cuts or not deltas or deltas[-1][0] > 0:
            deltas.append([])
        deltas[-1].append(delta)
    return [sorted(group) for group in deltas], trace.marks, trace.work, trace.kept_bytes


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("kept", "num_calls"), [(None, 4), (4, 4 + 9)], ids=["plain", "tapped"])
def test_the_trace_is_that_of_all_units(is_half: bool, is_recomputed: bool, kept: int | None, num_calls: int) -> None:
    """Where a block's output is kept beside the trunk, all units are recorded after all."""
    calls: list[int] = []
    with torch.device("meta"):
        model = Trunk(calls, kept)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(model)
        for block in model.blocks:
            block.checkpoint = is_recomputed
        units = plan_wrap(model, ShardingPlan(level=3), 1)
        inputs = [torch.empty(6, 4), torch.empty(10, 4)]

        def run_forward() -> tuple[Tensor, list[Tensor]]:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                return model(inputs)

        args = model, units, run_forward, inputs
        short = recorded(*args)
        assert len(calls) == num_calls * 2 * (1 + is_recomputed)
        assert what_matters(short) == what_matters(record_step(*args).trace)
