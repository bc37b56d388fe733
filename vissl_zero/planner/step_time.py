"""The time of a step at a level: computation, plus communication and traffic of disk and host.

A roofline over the recorded operations: every kernel takes the longer of its arithmetic and its memory traffic, at the
rates of a profile (``machine_profile.py``). Small layers do not reach these rates, so the estimates rank plans but do
not predict seconds. Messages, disk and host traffic are added without overlap.
"""

from __future__ import annotations

from vissl_zero.planner.machine_profile import MachineProfile, read_profile
from vissl_zero.planner.memory_model import ModelFacts, StepMemory
from vissl_zero.planner.step_trace import Kernel, StepTrace, Work
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import dtype_of
from vissl_zero.sharding.param_facts import params_on_disk


def cause_of(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


# Collectives of a unit: it is gathered for the forward and for the backward pass, and its gradients are reduced.
_TRANSFERS = 3
# A parameter that is read from a disk and written back costs, per micro-batch, about as much as this number of
# transfers. Measured with three small networks on two ranks (benchmarks/plan_accuracy.md).
_STREAMED_TRANSFERS = 1.5
_HALF = ("float16", "bfloat16")
_ASSUMED = {"cpu": "cpu_core", "cuda": "h100x8"}


def machine_for(device_type: str) -> MachineProfile:
    """Return the machine that plans assume for a type of device by default."""
    return read_profile(_ASSUMED[device_type])


def work_seconds(work: Work, plan: ShardingPlan, machine: MachineProfile, num_threads: int = 1) -> float:
    """Estimate the seconds of recorded operations, in the number formats of ``plan``."""
    is_half = plan.precision.autocast is not None or plan.precision.compute in _HALF
    flops = (machine.half_flops if is_half else machine.flops) * num_threads
    rates = {Kernel.CONVOLUTION: flops * machine.convolution_share}
    seconds = work.seconds(lambda kernel: rates.get(kernel, flops), machine.memory)
    return seconds + work.num_operations * machine.operation_s


def step_seconds(  # noqa: PLR0913
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    num_nodes: int,
    micro_batches: int,
    machine: MachineProfile,
    device_type: str,
    memory: StepMemory | None = None,
    num_threads: int = 1,
) -> float:
    """Estimate the seconds of one step of a rank.

    Args:
        trace, facts: see ``step_memory``.
        plan: level and tiers.
        world_size, num_nodes: number of ranks and of machines.
        micro_batches: micro-batches of a step.
        machine: machine with its rates.
        device_type: "cpu" or "cuda".
        memory: forecast memory of the same step; None: unknown.
        num_threads: threads of a rank on the CPU, which share the arithmetic.
    """
    num_ranks = plan.ranks_per_copy(world_size)
    compute = work_seconds(trace.work, plan, machine, num_threads)
    share = dtype_of(plan.precision.compute).itemsize / dtype_of(plan.precision.master).itemsize
    params = sum(param.num_bytes for param in facts.params.values())
    grads = sum(param.num_bytes for param in facts.params.values() if param.is_trained)
    teacher_bytes = sum(param.num_bytes for param in facts.teacher.values())
    part = grads / num_ranks
    state = facts.updates[num_ranks].state_bytes
    link = machine.near_link if num_nodes == 1 else machine.far_link
    group_link = machine.near_link if num_ranks <= world_size // num_nodes else machine.far_link
    cut = (num_ranks - 1) / num_ranks
    if plan.level == 0:
        # A ring all-reduce sends (N-1)/N of the gradients twice: to sum them, and to distribute the sums.
        ring = machine.reduce_link if machine.reduce_link and num_nodes == 1 else link
        sent = 2 * (world_size - 1) / world_size * grads / ring
    else:
        rounds = micro_batches if plan.level >= 2 else 1
        # Level 3 gathers before each forward and each backward pass; levels 1 and 2 once a step.
        gathers = 2 * micro_batches if plan.level == 3 else 1
        messages = sum(param.sent(1, share) for param in facts.params.values()) if plan.level == 3 else params * share
        sent = cut * (rounds * grads + gathers * messages) / group_link
        if plan.level == 3:
            sent += cut * micro_batches * sum(p.sent(1, share) for p in facts.teacher.values()) / group_link
            # All bytes are copied between parameters and messages: read once and written once.
            sent += 2 * (rounds * grads + (gathers * params + micro_batches * teacher_bytes) * share) / machine.memory
        replicas = world_size // num_ranks
        sent += 2 * (replicas - 1) / replicas * part / link
    # The update reads and writes state and parameters, and reads gradients.
    moved = 2 * state + 2 * params / num_ranks + part
    update = moved / machine.memory
    optimizer_place, params_place = (tier.place(device_type) for tier in (plan.offload_optimizer, plan.offload_params))
    if optimizer_place == "disk":
        update += 2 * state / machine.disk
    elif optimizer_place == "host":
        update += moved / machine.host
    if params_place == "disk":
        on_disk = params_on_disk(facts.params, plan, num_ranks).values()
        values = sum(param.num_bytes for param in on_disk) / num_ranks
        trained = sum(param.num_bytes for param in on_disk if param.is_trained) / num_ranks
        follows = sum(param.num_bytes for param in params_on_disk(facts.teacher, plan, num_ranks).values()) / num_ranks
        # Parameters are read for each pass, read and written by the update; gradients are read and written per
        # micro-batch.
        update += (2 * micro_batches * values + 2 * values + 2 * micro_batches * trained) / machine.disk
        # The teacher's parameters are read for each pass. To follow the model, they are read and written, and the
        # model's are read.
        update += (micro_batches + 3) * follows / machine.disk
    elif params_place == "host":
        update += (2 * micro_batches * params / num_ranks + part) / machine.host
        update += micro_batches * teacher_bytes / num_ranks / machine.host
    per_micro_batch = compute + _overhead_seconds(trace, facts, plan, world_size, machine, memory)
    return micro_batches * per_micro_batch + sent + update


def _overhead_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    machine: MachineProfile,
    memory: StepMemory | None,
) -> float:
    """Estimate seconds of overhead per micro-batch: fresh memory, latency of messages, handling of units."""
    seconds = 0.0
    if memory is not None and machine.fresh is not None:
        seconds += memory.cleared_bytes / machine.fresh + memory.num_mapped * machine.block_s
    if world_size > 1:
        seconds += trace.work.num_messages * machine.message_s
    if plan.level == 3:
        units, teacher_units = ({param.unit for param in params.values()} for params in (facts.params, facts.teacher))
        transfers: float = _TRANSFERS * len(units) + len(teacher_units)
        num_ranks = plan.ranks_per_copy(world_size)
        stored = sum(len(params_on_disk(params, plan, num_ranks)) for params in (facts.params, facts.teacher))
        transfers += _STREAMED_TRANSFERS * stored
        seconds += transfers * machine.transfer_s
    return seconds
