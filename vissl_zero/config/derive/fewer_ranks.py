"""The same run on fewer processes: the batch over all of them stays."""

from __future__ import annotations

from dataclasses import replace

from vissl_zero.config.resolved import ResolvedRun


def with_fewer_ranks(plan: ResolvedRun, least: int) -> ResolvedRun | None:
    """The plan for the most processes below the present number, at least ``least``, that divide the micro-batch.

    None if there are none. For runs on one machine.
    """
    micro_batch = plan.batch_per_rank * plan.world_size
    for number in range(plan.world_size - 1, least - 1, -1):
        if number < 1 or micro_batch % number:
            continue
        sharding = plan.sharding
        if sharding.shard_group_size == plan.world_size:
            sharding = replace(sharding, shard_group_size=number)
        if sharding.sync_bn_group == plan.world_size:
            sharding = replace(sharding, sync_bn_group=number)
        return replace(
            plan,
            world_size=number,
            procs_per_node=number,
            batch_per_rank=micro_batch // number,
            sharding=sharding,
        )
    return None
