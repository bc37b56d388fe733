"""A restart with fewer processes keeps every group whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.resolve.resolved import ResolvedRun, with_fewer_ranks


def _plan(folder: Path, world_size: int, shard_group: int, bn_group: int) -> ResolvedRun:
    plan = make_plan(make_config(), folder)
    sharding = replace(plan.sharding, level=3, shard_group_size=shard_group, sync_bn_group=bn_group)
    return replace(plan, world_size=world_size, procs_per_node=world_size, batch_per_rank=30, sharding=sharding)


@pytest.mark.parametrize(
    ("shard_group", "bn_group", "number", "groups"),
    [
        (8, 0, 6, (6, 0)),  # 7 does not divide 240 images
        (8, 8, 6, (6, 6)),
        (2, 0, 6, (2, 0)),
        (4, 0, 4, (4, 0)),
        (8, 4, 4, (4, 4)),
        (2, 4, 4, (2, 4)),
        (1, 2, 6, (1, 2)),
    ],
)
def test_groups_divide_the_ranks_that_are_left(
    tmp_path: Path, shard_group: int, bn_group: int, number: int, groups: tuple[int, int]
) -> None:
    fewer = with_fewer_ranks(_plan(tmp_path, 8, shard_group, bn_group), 1)
    assert fewer is not None and fewer.world_size == fewer.procs_per_node == number
    assert (fewer.sharding.shard_group_size, fewer.sharding.sync_bn_group) == groups
    assert fewer.batch_per_rank * number == 240


def test_no_number_of_ranks_is_better_than_one_that_breaks_a_group(tmp_path: Path) -> None:
    assert with_fewer_ranks(_plan(tmp_path, 8, 4, 0), 5) is None
