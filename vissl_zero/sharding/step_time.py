"""How long a step takes at a level, relative to others: a roofline over the recorded operations, plus what travels.

The rates behind it are those of this machine's cores, measured in seconds and remembered. A GPU's rates are those of a
profile (``config/host.py``).

Every kernel takes the longer of its arithmetic and its memory traffic; messages, disk and host traffic add up and hide
behind nothing. This ranks plans; it does not promise seconds.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import torch

from vissl_zero.atomic import replacing
from vissl_zero.config.host import MachineProfile, read_profile
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.memory_model import ModelFacts
from vissl_zero.sharding.precision import dtype_of
from vissl_zero.sharding.step_trace import Kernel, StepTrace, Work

_MIB = 2**20
_STREAMED = 64 * _MIB  # beyond any cache of a core
_SLOT = _MIB  # as the ranks' own messages (cpu_communicator.py)
_CHAIN = 200
_LAYERS = ((64, 28), (256, 7))  # channels, pixels a side


def measured_machine(device_type: str) -> MachineProfile | None:
    """What ``calibrate`` found here; None where it has not run here, or of a GPU."""
    if device_type != "cpu":
        return None
    try:
        found = json.loads(cache_file().read_text())
        return MachineProfile(**{item.name: found[item.name] for item in fields(MachineProfile)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def calibrate(folder: Path, seconds: float = 8.0) -> MachineProfile:
    """Measure this machine with one thread and remember it. Other load makes it look slower than it is.

    Args:
        folder: on the disk to be measured; 64 MiB are written there and removed.
        seconds: that all measurements may take together, about.
    Raises:
        OSError: the folder, or the cache, cannot be written.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    share = seconds / 8
    try:
        near = _exchange(share)  # forks: before anything else
        flops = _matmul(torch.float32, share)
        machine = MachineProfile(
            name=f"a core of {platform.node()}, measured",
            flops=flops,
            half_flops=_matmul(torch.bfloat16, share),
            memory=_stream(share),
            near_link=near,
            far_link=near / 2,
            host=_stream(0.0),
            disk=_disk(folder, share),
            operation_s=_operation(share),
            convolution_share=_convolution(share) / flops,
            fresh=_fresh(share),
            source=f"measured on this machine, torch {torch.__version__}; far_link is assumed to be half of near_link",
        )
    finally:
        torch.set_num_threads(threads)
    target = cache_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(asdict(machine), indent=1))
    return machine


def cache_file() -> Path:
    """Where the rates of this machine rest: another kind of processor or torch has another file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    about = Path("/proc/cpuinfo")
    model = (
        next((line for line in about.read_text().splitlines() if "model name" in line), "") if about.exists() else ""
    )
    facts = (platform.node(), platform.machine(), model, os.cpu_count(), torch.__version__)
    return cache / "vissl_zero" / f"machine_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def _best(run: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of the fastest of the runs that ``seconds`` allow, after one that does not count.

    By the processor's clock, unless ``clock`` is another: what others do in between is not counted.
    """
    run()
    end, best = time.perf_counter() + seconds, float("inf")
    while True:
        start = clock()
        run()
        # The fastest run: other load can only make one slower.
        best = min(best, clock() - start)
        if time.perf_counter() >= end:
            return best


def _matmul(dtype: torch.dtype, seconds: float) -> float:
    size = 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: torch.mm(a, b), seconds)


def _convolution(seconds: float) -> float:
    """Of two layers of a residual network, early and late, forward and backward."""
    layers = [(torch.nn.Conv2d(c, c, 3, padding=1, bias=False), torch.ones(16, c, s, s)) for c, s in _LAYERS]

    def run() -> None:
        for layer, images in layers:
            layer(images.requires_grad_()).sum().backward()

    # Three convolutions of each: forward, and backward to weights and to images.
    flops = sum(3 * 2 * images.numel() * 9 * images.shape[1] for _, images in layers)
    return flops / _best(run, seconds)


def _stream(seconds: float) -> float:
    a, b = torch.ones(_STREAMED // 4), torch.ones(_STREAMED // 4)
    return 3 * _STREAMED / _best(lambda: a.add_(b), seconds)


def _fresh(seconds: float) -> float:
    """Bytes a second that are mapped, written to and returned."""

    def run() -> None:
        with mmap.mmap(-1, _STREAMED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                fresh.madvise(mmap.MADV_HUGEPAGE)  # as ranks are started (allocator.py)
            for start in range(0, _STREAMED, mmap.PAGESIZE):
                fresh[start] = 1

    return _STREAMED / _best(run, seconds)


def _operation(seconds: float) -> float:
    """Of a small operation, forward and backward: dispatch, autograd and allocation."""
    weights = torch.ones(16, requires_grad=True)

    def run() -> None:
        x = weights
        for _ in range(_CHAIN):
            x = x * weights
        x.sum().backward()

    return _best(run, seconds) / (4 * _CHAIN)  # forward one; backward two products and a sum


def _disk(folder: Path, seconds: float) -> float:
    """Bytes a second, written until they are on the disk."""
    data = os.urandom(_MIB) * 8
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def run() -> None:
            file.seek(0)
            for _ in range(8):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return 8 * len(data) / _best(run, seconds, time.perf_counter)


def _exchange(seconds: float) -> float:
    """Bytes a second that each of two processes sends the other through shared memory, slot by slot."""
    context = multiprocessing.get_context("fork")
    slots = [mmap.mmap(-1, _SLOT) for _ in range(2)]
    barrier = context.Barrier(2, timeout=30.0)
    other = context.Process(target=_swap_until_broken, args=(slots, barrier), daemon=True)
    other.start()
    try:
        return _SLOT / _best(lambda: _swap(slots, 0, barrier), seconds, time.perf_counter)
    finally:
        # The other process waits at the barrier, and ends when it breaks.
        barrier.abort()
        other.join(30.0)
        if other.is_alive():
            other.kill()


_MINE, _THEIRS = bytes(_SLOT), bytearray(_SLOT)


def _swap(slots: list[mmap.mmap], rank: int, barrier: Any) -> None:
    slots[rank][:] = _MINE
    barrier.wait()
    memoryview(_THEIRS)[:] = memoryview(slots[1 - rank])
    barrier.wait()


def _swap_until_broken(slots: list[mmap.mmap], barrier: Any) -> None:
    with suppress(BrokenBarrierError):
        while True:
            _swap(slots, 1, barrier)


_HALF = ("float16", "bfloat16")
_ASSUMED = {"cpu": "cpu_core", "cuda": "h100x8"}


def machine_for(device_type: str) -> MachineProfile:
    """What a plan assumes of a device where nothing says more."""
    return read_profile(_ASSUMED[device_type])


def work_seconds(work: Work, plan: ShardingPlan, machine: MachineProfile, num_threads: int = 1) -> float:
    """Estimated seconds of recorded operations, in the number formats of ``plan``."""
    is_half = plan.precision.autocast is not None or plan.precision.compute in _HALF
    flops = (machine.half_flops if is_half else machine.flops) * num_threads
    rates = {Kernel.CONVOLUTION: flops * machine.convolution_share}
    seconds = work.seconds(lambda kernel: rates.get(kernel, flops), machine.memory)
    return seconds + work.num_operations * machine.operation_s


def step_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    num_nodes: int,
    micro_batches: int,
    machine: MachineProfile,
    device_type: str,
    cleared_bytes: int = 0,
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
        cleared_bytes: of ``StepMemory``.
        num_threads: of a rank, on the CPU: they share the arithmetic.
    """
    num_ranks = (plan.shard_group_size if plan.shard_group_size > 1 else world_size) if plan.level else 1
    compute = work_seconds(trace.work, plan, machine, num_threads)
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
            # Between parameters and messages all is copied once more: read and written.
            sent += 2 * (rounds * grads + (gathers * params + micro_batches * taught) * share) / machine.memory
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
        own = params / num_ranks
        # Parameters are read for each pass, read and written by the update; gradients are read and written per
        # micro-batch.
        update += (2 * micro_batches * own + 2 * own + 2 * micro_batches * part) / machine.disk
        # A teacher's are read for each pass; to follow, they are read and written, and those of the model are read.
        update += (micro_batches + 3) * taught / num_ranks / machine.disk
    elif params_place == "host":
        update += (2 * micro_batches * params / num_ranks + part) / machine.host
        update += micro_batches * taught / num_ranks / machine.host
    if machine.fresh is not None:
        compute += cleared_bytes / machine.fresh
    return micro_batches * compute + sent + update
