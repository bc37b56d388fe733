"""The pool of ranks that the other tests stand on."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_on_ranks


def _sum_of_ranks(offset: int) -> float:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return total.item()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("told to")
    dist.barrier()


def _hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_in_one_group(world_size: int) -> None:
    total = sum(range(world_size)) + 10.0 * world_size
    assert run_on_ranks(world_size, _sum_of_ranks, 10) == [total] * world_size


@pytest.mark.timeout(30)
def test_a_rank_that_raises_fails_with_its_traceback_and_the_pool_lives_on() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*ValueError: told to") as caught:
        run_on_ranks(2, _raise_on_rank_one, timeout_s=20)
    assert "_raise_on_rank_one" in str(caught.value)
    assert run_on_ranks(2, _sum_of_ranks, 0) == [1.0, 1.0]


@pytest.mark.timeout(30)
def test_a_rank_that_hangs_is_killed_with_its_stack() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="_hang_on_rank_zero"):
        run_on_ranks(2, _hang_on_rank_zero, timeout_s=2, group_timeout_s=60)
    assert time.monotonic() - started < 10
