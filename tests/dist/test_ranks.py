"""The pool of ranks that the other tests stand on."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_on_ranks
from vissl_zero.collectives import sum_later


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
        time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_in_one_group(world_size: int) -> None:
    total = sum(range(world_size)) + 10.0 * world_size
    assert run_on_ranks(world_size, _sum_of_ranks, 10) == [total] * world_size


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_raises_fails_with_its_traceback_and_the_pool_lives_on() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*ValueError: told to") as caught:
        run_on_ranks(2, _raise_on_rank_one, timeout_s=20)
    assert "_raise_on_rank_one" in str(caught.value)
    assert run_on_ranks(2, _sum_of_ranks, 0) == [1.0, 1.0]


@pytest.mark.timeout(200)
def test_a_rank_that_hangs_is_killed_with_its_stack() -> None:
    run_on_ranks(2, _sum_of_ranks, 0)  # the pool has started: its seconds are not those of the hang
    started = time.monotonic()
    with pytest.raises(RankError, match="_hang_on_rank_zero"):
        run_on_ranks(2, _hang_on_rank_zero, timeout_s=2, group_timeout_s=60)
    assert time.monotonic() - started < 30


def _leave_sums_unread(folder: str, num_groups: int) -> list[float]:
    """Groups that are taken down while sums are under way in them; those that are kept are read afterwards."""
    read = []
    for number in range(num_groups):
        kept = [sum_later(torch.full((3 + number % 5,), float(index))) for index in range(8)]
        for index in range(8):
            sum_later(torch.full((1 + index,), 1.0, dtype=torch.float64))  # nobody will ask for it
        if number % 3 == 0:
            kept.clear()
        dist.destroy_process_group()
        if number % 2:
            gc.collect()
        filler = [torch.zeros(n % 24) for n in range(200)]  # takes up whatever memory was freed too early
        read += [float(wait()[0]) for wait in kept]
        assert not any(tensor.any() for tensor in filler)
        store = dist.FileStore(f"{folder}/store{number}", 3)
        timeout = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=_rank_of(store), world_size=3, timeout=timeout)
    return read


def _rank_of(store: dist.Store) -> int:
    """A number for each process, in the order in which they come."""
    return store.add("ranks", 1) - 1


@pytest.mark.timeout(60)
def test_a_group_is_taken_down_while_sums_are_under_way(tmp_path: Path) -> None:
    """As at the end of a run, or after an error, when the figures of the last step have not been read."""
    for read in run_on_ranks(3, _leave_sums_unread, str(tmp_path), 12, timeout_s=50):
        assert read == [3.0 * index for _ in range(8) for index in range(8)]
