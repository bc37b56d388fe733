"""Collectives through shared memory and through gloo, against what they stand for."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.ranks import RankError, run_on_ranks
from vissl_zero.sharding.engines import cpu_communicator
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator, GlooCommunicator, SharedMemoryCommunicator
from vissl_zero.sharding.engines.torch.gradient_messages import plan_messages
from vissl_zero.sharding.state.shard import RowShard, row_shards


def _open(kind: str) -> CpuCommunicator:
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:  # undone: the next test may have other ranks beside this process
        patch.setattr(cpu_communicator, "SLOT_BYTES", 4096)  # so that a message takes many slots
        comm = cpu_communicator.open_communicator(group, 5.0, use_shared_memory=kind == "shared memory")
    assert isinstance(comm, SharedMemoryCommunicator if kind == "shared memory" else GlooCommunicator)
    return comm


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _collectives(kind: str, numels: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    comm = _open(kind)
    results = []
    for numel in numels:
        mine = _values(dist.get_rank(), numel * dist.get_world_size())
        total, mean, everything = torch.empty(numel), torch.empty(numel), torch.empty_like(mine)
        comm.reduce_scatter(total, mine, is_mean=False)
        comm.reduce_scatter(mean, mine, is_mean=True)
        comm.all_gather(everything, mine[:numel])
        results.append((total, mean, everything))
    return results


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_sums_are_those_of_the_ranks_in_order_bit_for_bit(kind: str, world_size: int) -> None:
    numels = [1, 7, 2000, 50_000]
    for rank, results in enumerate(run_on_ranks(world_size, _collectives, kind, numels)):
        for numel, (total, mean, everything) in zip(numels, results, strict=True):
            given = [_values(sender, numel * world_size) for sender in range(world_size)]
            expected = given[0][rank * numel : (rank + 1) * numel]
            for values in given[1:]:
                expected = expected + values[rank * numel : (rank + 1) * numel]
            assert total.equal(expected)
            assert mean.equal(expected / world_size)
            assert everything.equal(torch.cat([values[:numel] for values in given]))


def _gradients_of_a_unit() -> bool:
    """Whether the mean gradient is that of the sum in the order of ranks, bit for bit."""
    model = nn.Linear(500, 6, bias=False)
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": 3})
    inputs = [torch.randn(4, 500, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    optimizer.backward(model(inputs[dist.get_rank()]).square().sum())
    weight = model.weight.full_tensor()
    gradients = [2 * (each @ weight.T).T @ each for each in inputs]
    expected = ((gradients[0] + gradients[1]) + gradients[2]) / 3
    return torch.equal(model.weight.grad.full_tensor(), expected)


def test_gradients_of_units_are_summed_by_the_communicator() -> None:
    assert all(run_on_ranks(3, _gradients_of_a_unit))


def _bytes_sent(kind: str) -> dict[str, int]:
    comm = _open(kind)
    whole = torch.zeros(4 * 3000)
    comm.reduce_scatter(torch.empty(3000), whole, is_mean=False)
    comm.all_gather(whole, torch.zeros(3000))
    return dict(comm.sent_bytes)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_a_rank_sends_three_quarters_to_three_others(kind: str) -> None:
    assert run_on_ranks(4, _bytes_sent, kind) == [{"gradients": 36_000, "parameters": 36_000}] * 4


def _letter(sender: int, receiver: int) -> Tensor:
    """Of another length for every pair, some longer than a slot, some empty."""
    numel = (sender * 7919 + receiver * 2_503) % 9_000 if sender != 2 else 0
    return _values(sender * 10 + receiver, numel).view(torch.uint8)


def _everyone_to_everyone(kind: str) -> list[list[Tensor]]:
    comm = _open(kind)
    ranks, me = range(dist.get_world_size()), dist.get_rank()
    sent = [[_letter(me, receiver)[:5], _letter(me, receiver)[5:]] for receiver in ranks]
    found = [torch.zeros_like(_letter(sender, me)) for sender in ranks]
    # Cut elsewhere than the sender has cut it, with a piece of nothing.
    received = [[letter[:4000], letter[4000:4000], letter[4000:]] for letter in found]
    most = max(len(_letter(a, b)) for a in ranks for b in ranks)
    for _ in range(2):  # the second time slots have been used
        comm.all_to_all(received, sent, most)
    return [found, received[me]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_everyone_sends_everyone_something_else(kind: str, world_size: int) -> None:
    for rank, (found, own) in enumerate(run_on_ranks(world_size, _everyone_to_everyone, kind)):
        assert not any(part.any() for part in own)
        for sender in set(range(world_size)) - {rank}:
            assert found[sender].equal(_letter(sender, rank)), sender


def _wait_for_one_that_dies(how: str) -> None:
    comm = _open("shared memory")
    if dist.get_rank() == 1:
        if how == "ends":
            os._exit(3)
        time.sleep(8)
    comm.all_gather(torch.empty(8), torch.zeros(4))


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("how", "message"), [("ends", "has ended|died"), ("sleeps", "No answer from peer rank 1")])
def test_a_rank_that_is_lost_is_named(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_on_ranks(2, _wait_for_one_that_dies, how, timeout_s=30)


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes: list[Any] = [(3, 5), (1,), (0, 4), (), (700, 3), (2, 1000), (7,), (1, 900)]
        formats = [torch.float32, torch.float32, torch.float64, torch.float64] * 2
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, formats, strict=True)]
        self.params = nn.ParameterList(map(nn.Parameter, tensors))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("capacity", [3, 64, 1000, 10**6])
def test_messages_carry_every_element_once_and_in_place(num_ranks: int, capacity: int) -> None:
    model = _Odd()
    names = {name for name, _ in model.named_parameters()}
    of_rank = [list(row_shards(model, names, num_ranks, rank)) for rank in range(num_ranks)]
    shards = [shard for shard in of_rank[0] if isinstance(shard, RowShard)]
    messages = plan_messages(shards, num_ranks, lambda dtype: capacity if dtype == torch.float32 else capacity - 1)
    sent = {shard.name: torch.zeros(shard.full_shape).view(-1) for shard in shards}
    begins: dict[str, int] = {}
    stops: dict[torch.dtype, int] = {}
    for message in messages:
        assert message.num_flagged <= capacity - (message.dtype == torch.float64)
        assert message.start == stops.get(message.dtype, 0)
        stops[message.dtype] = message.stop
        assert {piece.shard.source.dtype for piece in message.pieces} == {message.dtype}
        assert message.payload == sum(piece.numel for piece in message.pieces)
        for piece in message.pieces:
            begin = begins.setdefault(piece.shard.name, message.start + piece.offset)
            for rank, (start, stop) in enumerate(piece.spans):
                assert stop - start <= piece.numel
                sent[piece.shard.name][start:stop] += 1
                if stop > start:  # one parameter's part lies in one run
                    assert start - piece.shard.span(rank)[0] == message.start + piece.offset - begin
    assert all(values.eq(1).all() for values in sent.values())
    for shards_of_rank in zip(*of_rank, strict=True):
        assert sum(shard.local.numel() for shard in shards_of_rank) == shards_of_rank[0].full_shape.numel()
