"""How long a step takes at a level, relative to others: a roofline over the recorded operations, plus what travels.

Every kernel takes the longer of its arithmetic and its memory traffic; messages, disk and host traffic add up and hide
behind nothing. This ranks plans; it does not promise seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.memory_model import ModelFacts
from vissl_zero.sharding.precision import dtype_of
from vissl_zero.sharding.step_trace import StepTrace


@dataclass(frozen=True)
class Machine:
    """Rates that a rank sees.

    Attributes:
        name: for people.
        flops: of matrix products, a second, in float32 or as autocast has them.
        memory: bytes a second where it computes.
        near_link, far_link: bytes a second a rank sends to others on its machine, and to other machines.
        host: bytes a second between device and host memory.
        disk: bytes a second of a rank's share of a local disk.
        operation_s: overhead of one operation.
    """

    name: str
    flops: float
    memory: float
    near_link: float
    far_link: float
    host: float
    disk: float
    operation_s: float


# One core of a server CPU: AdamW streams 24 GB/s (optim/elementwise.py), two ranks exchange 2.4 GB/s through memory
# (sharding/exchange/messages.py), and a local disk about 1.5 GB/s (docs/offload.md); 50 GFLOP/s is float32 with AVX2.
CPU_CORE = Machine("one CPU core", 50e9, 20e9, 2.4e9, 1.2e9, 20e9, 1.5e9, 2e-5)
# https://resources.nvidia.com/en-us-tensor-core: H100 SXM, dense bf16, HBM3, NVLink 4 one way; 400 Gb/s of network.
# Matrix products reach about half of the peak in practice.
H100 = Machine("an NVIDIA H100 SXM", 0.5 * 989e12, 3.35e12, 450e9, 50e9, 55e9, 3e9, 5e-6)


def machine_for(device_type: str) -> Machine:
    """What a plan assumes of a device."""
    return H100 if device_type == "cuda" else CPU_CORE


def step_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    num_nodes: int,
    micro_batches: int,
    machine: Machine,
    num_threads: int = 1,
) -> float:
    """Estimated seconds of one step of a rank.

    Args:
        trace, facts: as for ``step_memory``.
        plan: level and tiers.
        world_size, num_nodes: ranks and machines.
        micro_batches: per step.
        machine: its rates.
        num_threads: of a rank, on the CPU: they share the arithmetic.
    """
    num_ranks = (plan.shard_group_size if plan.shard_group_size > 1 else world_size) if plan.level else 1
    compute = max(trace.flops / (machine.flops * num_threads), trace.moved_bytes / machine.memory)
    compute += trace.num_operations * machine.operation_s
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
        sent = 2 * (world_size - 1) / world_size * grads / link
    else:
        rounds = micro_batches if plan.level >= 2 else 1
        gathers = 2 * micro_batches if plan.level == 3 else 1
        sent = cut * (rounds * grads + gathers * params * share) / group_link
        if plan.level == 3:
            sent += cut * micro_batches * taught * share / group_link
        replicas = world_size // num_ranks
        sent += 2 * (replicas - 1) / replicas * part / link
    moved = 2 * state + 2 * params / num_ranks + part
    update = moved / machine.memory
    if plan.offload_optimizer.device == "nvme":
        update += 2 * state / machine.disk
    elif plan.offload_optimizer.device == "cpu" and machine.name != CPU_CORE.name:
        update += moved / machine.host
    if plan.offload_params.device == "nvme":
        own = params / num_ranks
        update += (2 * micro_batches * own + 2 * own + 2 * micro_batches * part) / machine.disk
    elif plan.offload_params.device == "cpu" and machine.name != CPU_CORE.name:
        update += (2 * micro_batches * params / num_ranks + part) / machine.host
    return micro_batches * compute + sent + update
