"""A process that ends its groups and makes new ones trains as a new process would."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

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
