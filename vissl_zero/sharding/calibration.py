"""What a core of this machine really does, measured in seconds and remembered: the rates behind forecasts of time.

Only the CPU is measured. A GPU's rates are those of a profile (``config/machine_profile.py``).
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
from vissl_zero.config.machine_profile import Machine

_MIB = 2**20
_STREAMED = 64 * _MIB  # beyond any cache of a core
_SLOT = _MIB  # as the ranks' own messages (cpu_comm/open_communicator.py)
_CHAIN = 200
_LAYERS = ((64, 28), (256, 7))  # channels, pixels a side


def measured_machine(device_type: str) -> Machine | None:
    """What ``calibrate`` found here; None where it has not run here, or of a GPU."""
    if device_type != "cpu":
        return None
    try:
        found = json.loads(cache_file().read_text())
        return Machine(**{item.name: found[item.name] for item in fields(Machine)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def calibrate(folder: Path, seconds: float = 8.0) -> Machine:
    """Measure this machine with one thread and remember it. Other load makes it look slower than it is.

    Args:
        folder: on the disk to be measured; 64 MiB are written there and removed.
        seconds: that all measurements may take together, about.
    Raises:
        OSError: the folder, or the cache, cannot be written.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    share = seconds / 7
    try:
        near = _exchange(share)  # forks: before anything else
        flops = _matmul(torch.float32, share)
        machine = Machine(
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
            source=f"measured on this machine, torch {torch.__version__}; far_link is half of near_link by assumption",
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
