"""Where the torch engine has no units: parameters that stay whole on every rank."""

from __future__ import annotations

from vissl_zero.config.resolved import ShardingPlan

NO_UNITS = " has no effect at levels 1 and 2 on the CPU, where parameters stay whole."


def keeps_parameters_whole(plan: ShardingPlan, num_ranks: int, world_size: int, device_type: str) -> bool:
    """Whether the torch engine leaves parameters whole on every rank between steps, instead of gathering them.

    So at levels 1 and 2 on the CPU, in one number format and with one copy of the state: ``fully_shard`` would copy all
    of them in and out of buffers, which costs as much there as the communication.

    Args:
        plan: level, engine, precision, tiers.
        num_ranks: that share one copy of the state.
        world_size: all ranks.
        device_type: "cpu" or "cuda".
    """
    precision = plan.precision
    return (
        plan.engine == "torch"
        and plan.level in (1, 2)
        and device_type == "cpu"
        and num_ranks == world_size
        and plan.offload_params.device != "nvme"
        and {precision.compute, precision.reduce} == {precision.master}
    )
