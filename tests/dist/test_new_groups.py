"""A process that ends its groups and makes new ones trains as a new process would."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import vissl_zero
from tests.dist.case import Case, Outcome
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks


def _train_with_new_groups(folder: str, num_other_groups: list[int]) -> list[Outcome]:
    """Train once for each number of other groups, which are made first and so shift the names of the model's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outcomes = []
    for training, num_others in enumerate(num_other_groups):
        dist.barrier()  # a slower rank may still use the connections
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store_{training}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        for _ in range(num_others):
            dist.new_group([0, 1])
        outcomes.append(train_sharded(Case(), 3, {"shard_group_size": 2}))
    return outcomes


def test_shard_groups_of_new_process_groups_are_used(tmp_path: Path) -> None:
    first, *later = run_on_ranks(4, _train_with_new_groups, str(tmp_path), [4, 0, 2])[0]
    for outcome in later:
        assert outcome.losses == first.losses
        for name, tensor in first.state.items():
            torch.testing.assert_close(outcome.state[name], tensor, rtol=0, atol=0)


def _join_slowly(seconds: float) -> float:
    """Seconds that ``initialize`` takes on this rank, where rank 1 takes so many to join each new group."""
    make = dist.new_group

    def make_slowly(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        time.sleep(seconds * dist.get_rank())
        return group

    begun = time.monotonic()
    with patch.object(dist, "new_group", make_slowly):
        vissl_zero.initialize(nn.Linear(2, 2), {"type": "SGD", "lr": 0.1}, {"level": 0}, timeout_s=30)
    return time.monotonic() - begun


def test_no_rank_leaves_initialize_before_all_have_joined_its_group() -> None:
    """A script may end at once, and with it the connections that a slower rank still makes."""
    assert min(run_on_ranks(2, _join_slowly, 0.5, timeout_s=30)) >= 0.5
