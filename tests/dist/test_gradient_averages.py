"""Averages of gradients over ranks: their order, and what they send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero.sharding.engines.gradient_average import OrderedReduceScatter

# Their sum depends on the order: 1e8 swallows 3 in float32, and what is left after it goes does not come back.
ADDENDS = ([1e8, 3.0], [3.0, 1e8], [-1e8, -1e8])


def _reduced(is_mean: bool) -> Tensor:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    reduce = OrderedReduceScatter()
    given = torch.tensor(ADDENDS[rank] * 3)  # two elements for each of three ranks
    output = reduce.allocate([2], dtype=torch.float32, device=torch.device("cpu"))
    reduce(output, given, group, dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM)
    return output


@pytest.mark.parametrize("is_mean", [False, True])
def test_ranks_are_added_one_after_the_other(is_mean: bool) -> None:
    columns = torch.tensor(ADDENDS)
    expected = (columns[0] + columns[1] + columns[2]) / (3 if is_mean else 1)
    assert all(output.equal(expected) for output in run_on_ranks(3, _reduced, is_mean))


def _bytes_of_a_step() -> int:
    model, optimizer = vissl_zero.initialize(nn.Linear(7, 4), {"type": "SGD", "lr": 0.1}, {"level": 0})
    optimizer.backward(model(torch.ones(2, 7)).square().mean())
    return optimizer._sharded.means.sent_bytes  # type: ignore[no-any-return]


@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(1, 0), (2, 128), (3, 170)])
def test_a_ring_sends_twice_the_others_share_of_the_gradients(num_ranks: int, num_bytes: int) -> None:
    assert run_on_ranks(num_ranks, _bytes_of_a_step) == [num_bytes] * num_ranks
