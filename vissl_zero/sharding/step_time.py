"""How long a step takes at a level, relative to others: a roofline over the recorded operations, plus what travels.

Every kernel takes the longer of its arithmetic and its memory traffic; messages, disk and host traffic add up and hide
behind nothing. This ranks plans; it does not promise seconds.
"""

from __future__ import annotations

from vissl_zero.config.machine_profile import Machine, read_profile
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.memory_model import ModelFacts
from vissl_zero.sharding.precision import dtype_of
from vissl_zero.sharding.step_trace import StepTrace
from vissl_zero.sharding.work import Kernel

_HALF = ("float16", "bfloat16")
_ASSUMED = {"cpu": "cpu_core", "cuda": "h100x8"}


def machine_for(device_type: str) -> Machine:
    """What a plan assumes of a device where nothing says more."""
    return read_profile(_ASSUMED[device_type])


def step_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    num_nodes: int,
    micro_batches: int,
    machine: Machine,
    device_type: str,
    num_threads: int = 1,
) -> float:
    """Estimated seconds of one step of a rank.

    Args:
        trace, facts: as for ``step_memory``.
        plan: level and tiers.
        world_size, num_nodes: ranks and machines.
        micro_batches: per step.
        machine: its rates.
        device_type: "cpu" or "cuda": on the CPU the tier ``cpu`` is where state is anyway.
        num_threads: of a rank, on the CPU: they share the arithmetic.
    """
    num_ranks = (plan.shard_group_size if plan.shard_group_size > 1 else world_size) if plan.level else 1
    is_half = plan.precision.autocast is not None or plan.precision.compute in _HALF
    flops = machine.half_flops if is_half else machine.flops
    rates = {Kernel.CONVOLUTION: flops * num_threads * machine.convolution_share}
    compute = trace.work.seconds(lambda kernel: rates.get(kernel, flops * num_threads), machine.memory)
    compute += trace.work.num_operations * machine.operation_s
    share = dtype_of(plan.precision.compute).itemsize / dtype_of(plan.precision.master).itemsize
    params = sum(param.num_bytes for param in facts.params.values())
    grads = sum(param.num_bytes for param in facts.params.values() if param.is_trained)
    taught = sum(param.num_bytes for param in facts.teacher.values())
    part = grads / num_ranks
    state = facts.updates[num_ranks].state_bytes
    link = machine.near_link if num_nodes == 1 else machine.far_link
    group_link = machine.near_link if num_ranks <= world_size // num_nodes else machine.far_link
    cut = (num_ranks - 1) / num_ranks
    if plan.level == 0:
        # A ring all-reduce sends (N-1)/N of the gradients twice: to sum them, and to tell the sums.
        sent = 2 * (world_size - 1) / world_size * grads / link
    else:
        rounds = micro_batches if plan.level >= 2 else 1
        # Level 3 gathers before each forward and each backward pass; levels 1 and 2 once a step.
        gathers = 2 * micro_batches if plan.level == 3 else 1
        sent = cut * (rounds * grads + gathers * params * share) / group_link
        if plan.level == 3:
            sent += cut * micro_batches * taught * share / group_link
        replicas = world_size // num_ranks
        sent += 2 * (replicas - 1) / replicas * part / link
    # The update reads and writes state and parameters, and reads gradients.
    moved = 2 * state + 2 * params / num_ranks + part
    update = moved / machine.memory
    if plan.offload_optimizer.device == "nvme":
        update += 2 * state / machine.disk
    elif plan.offload_optimizer.device == "cpu" and device_type == "cuda":
        update += moved / machine.host
    if plan.offload_params.device == "nvme":
        own = params / num_ranks
        # Parameters are read for each pass, read and written by the update; gradients are read and written per
        # micro-batch.
        update += (2 * micro_batches * own + 2 * own + 2 * micro_batches * part) / machine.disk
    elif plan.offload_params.device == "cpu" and device_type == "cuda":
        update += (2 * micro_batches * params / num_ranks + part) / machine.host
    return micro_batches * compute + sent + update
