"""What a loop writes into parameters is noted until the next update, so that ranks that write differently are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.checks.replica_check import ParameterGuard, _FirstPasses
from vissl_zero.sharding.state.checksum import checksum
from vissl_zero.sharding.state.shard import Shard, shards_of, whole_shard

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "sums"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), [6.0, 1.0 + 1.5 * 2 + 2 * 3]),
        (torch.tensor([[3.0, 2.0], [1.0, 0.0]]), [6.0, 3 + 2 * 4 / 3 + 5 / 3]),
        (torch.tensor([3, 2, 1]), [6.0, 3 + 1.5 * 2 + 2]),
        (torch.tensor([True, False]), [1.0, 1.0]),
        (torch.tensor([NAN, 2.0]), [2.0, 4.0]),
        (torch.tensor(5.0), [5.0, 5.0]),
        (torch.zeros(0, 3), [0.0, 0.0]),
        (torch.ones(2, device="meta"), [0.0, 0.0]),
        (torch.ones(2, dtype=torch.complex64), [0.0, 0.0]),
    ],
)
def test_a_checksum_is_of_the_values_and_of_their_order(values: Tensor, sums: list[float]) -> None:
    found = checksum(values)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(sums, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_checksum_of_many_values_is_summed_in_double_precision() -> None:
    """In float32 a sum of 2^24 ones and more stands still."""
    ones = torch.ones(2**24 + 3)
    assert checksum(ones)[0] == 2**24 + 3
    assert checksum(torch.tensor([INF, 1.0])).isfinite().all()


def _weight(group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2, bias=False)
    fully_shard(model)
    list(shards_of(model, group))
    return model, model.weight


FULL = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("write", "operand"),
    [
        (lambda weight: weight.mul_(2.0), torch.tensor(2.0)),
        (lambda weight: weight.add_(3), torch.tensor(3)),
        (lambda weight: weight.mul_(torch.tensor(0.5)), torch.tensor(0.5)),
        (lambda weight: weight.add_(FULL), FULL),
        (lambda weight: weight.add_(torch.arange(3.0)), torch.arange(3.0).expand(2, 3)),
        (lambda weight: weight.copy_(FULL), FULL),
    ],
)
def test_numbers_and_full_tensors_that_are_combined_into_a_parameter_are_noted(
    write: Callable[[Any], Any], operand: Tensor, group: dist.ProcessGroup
) -> None:
    _, weight = _weight(group)
    with torch.no_grad():
        assert weight.taken is None
        write(weight)
        torch.testing.assert_close(weight.taken, checksum(operand))
        write(weight)  # both count
        torch.testing.assert_close(weight.taken, 2 * checksum(operand))
        _ = weight + FULL  # nothing is written
        torch.testing.assert_close(weight.taken, 2 * checksum(operand))


def test_what_shares_a_parameters_memory_is_the_parameter_until_it_gets_other_values(group: dist.ProcessGroup) -> None:
    (_, weight), (_, other) = _weight(group), _weight(group)
    first, of_first = weight.data, weight.data.data
    with torch.no_grad():
        first.mul_(2.0)
        of_first.mul_(2.0)
    torch.testing.assert_close(weight.taken, 2 * checksum(torch.tensor(2.0)), msg="written through either")
    weight.data = first  # its own memory: nothing to do
    torch.testing.assert_close(weight.taken, 2 * checksum(torch.tensor(2.0)))
    for memory in (other, other.data, other.data.data, other.data[:1]):
        with pytest.raises(VisslZeroError, match="another parameter's memory"):
            weight.data = memory
    before = weight.full_tensor().clone()
    weight.data = FULL
    assert torch.equal(weight.full_tensor(), FULL)
    assert all(torch.equal(one.full_tensor(), before) for one in (first, of_first)), "they keep the old values"
    noted = weight.taken.clone()
    with torch.no_grad():
        first.mul_(2.0)
    torch.testing.assert_close(weight.taken, noted, msg="no longer a write into the parameter")
    weight.data = first
    assert torch.equal(weight.full_tensor(), 2 * before)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_write_is_told_until_an_update(is_sharded: bool, group: dist.ProcessGroup) -> None:
    model = nn.Linear(3, 2, bias=False)
    if is_sharded:
        fully_shard(model)
        shards = list(shards_of(model, group))
    else:
        shards = [whole_shard("weight", model.weight)]
    optimizer = torch.optim.SGD([shard.local for shard in shards], lr=0.1)
    guard, weight = ParameterGuard(model, shards, optimizer), model.weight
    assert guard.written() == 0
    digests = []
    for factor in (2.0, 3.0):
        with guard.own_writes(), torch.no_grad():
            weight.mul_(factor)
        assert guard.written() == 0, "sharding's own"
        with torch.no_grad():
            weight.mul_(factor)
        digests.append(guard.written())
        with guard.own_step():
            optimizer.step()
        assert guard.written() == 0
    assert 0 not in digests and digests[0] != digests[1]


def test_what_counts_of_writes_is_what_all_ranks_must_agree_on(group: dist.ProcessGroup) -> None:
    """A parameter that all ranks hold, one of which this rank has rows, and one that half of the ranks hold."""
    model, weight = _weight(group)
    whole = nn.Parameter(FULL.clone())
    shards = [whole_shard("w", whole), *shards_of(model, group), Shard("w", whole, whole, whole.shape, num_copies=2)]
    shards[1].num_copies = 2
    assert [shard.is_held_whole for shard in shards] == [True, False, False]
    with torch.no_grad():
        weight.mul_(2.0)
    expected = [checksum(FULL), checksum(torch.tensor(2.0)), torch.zeros(2, dtype=torch.float64)]
    assert all(map(torch.equal, [shard.sum_of_writes() for shard in shards], expected))
    for shard in shards:
        shard.forget_writes()
    assert shards[1].sum_of_writes().tolist() == [0.0, 0.0]


def test_a_model_is_looked_at_after_its_first_passes_alone() -> None:
    model, seen = nn.Linear(3, 2), []
    _FirstPasses(model, lambda: seen.append(1))
    for _ in range(5):
        model(torch.ones(1, 3))
    assert len(seen) == 2 and not model._forward_hooks
