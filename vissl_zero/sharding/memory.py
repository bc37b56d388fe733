"""Bytes of a rank by kind, counted as unique storages: padding included, shared memory once."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vissl_zero.sharding.state.shard import Shard
from vissl_zero.sharding.torch_private import object_address, real_grad


@dataclass(frozen=True)
class Bytes:
    """Memory of this rank by kind, in bytes.

    Attributes:
        params: parameters: this rank's shards, and full parameters of units that are gathered now.
        grads: gradients, counted in the same way.
        optimizer: state of the optimizer, without step counters.
        activations: memory that the measured forward pass kept alive for the backward pass.
        buffers: running statistics and other buffers, and the running average of the weights.
        teacher: parameters and buffers of the teacher in memory: its shards unless they are on a disk, and whole
            parameters where units are gathered.
        peak: peak so far: resident memory on CPU, allocated memory on CUDA.
        params_step_peak: parameters at the peak of a step, by the wrap plan: shards, and the units that are gathered
            together.
    """

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    peak: int = 0
    params_step_peak: int = 0
    teacher: int = 0


class Storages:
    """Unique storages by address; adding one twice counts it once."""

    def __init__(self, tensors: Iterable[Tensor | None] = ()):
        self._sizes: dict[int, int] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor | None]) -> None:
        """Add the storage of each tensor; None, meta tensors and storages that were freed count as 0 bytes."""
        for tensor in tensors:
            if tensor is not None and not _plain(tensor).is_meta:
                storage = _plain(tensor).untyped_storage()
                if size := storage.nbytes():
                    self._sizes[_address(storage)] = size

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(self._sizes.values())

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return _address(storage) in self._sizes


def parameter_storages(model: nn.Module, shards: Iterable[Shard]) -> Storages:
    """Collect the storages of this rank's shards, and of full parameters of units that are gathered now."""
    storages = Storages(shard.local for shard in shards)
    storages.add(model.parameters())
    return storages


def gradient_storages(model: nn.Module, shards: Iterable[Shard]) -> Storages:
    """Collect the storages of this rank's gradient shards, and of full gradients until the last micro-batch."""
    storages = Storages(shard.local_grad() for shard in shards)
    storages.add(real_grad(param) for param in model.parameters())
    return storages


def optimizer_storages(optimizer: torch.optim.Optimizer) -> Storages:
    """Collect the optimizer's storages in memory: its state, without step counters, or the buffers that stream it."""
    buffers: list[Tensor] | None = getattr(optimizer, "resident_tensors", None)
    if buffers is not None:  # the state is on a disk
        return Storages(buffers)
    entries = (entry for state in optimizer.state.values() for entry in state.items())
    return Storages(value for key, value in entries if isinstance(value, Tensor) and key != "step")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    high_water = _status("VmHWM")  # not ru_maxrss, which a process inherits from its parent
    if high_water is not None:
        return high_water
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage reports bytes on macOS, and KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error is of a failed allocation: CUDA's, the CPU allocator's, or Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not report it."""
    return _status("VmRSS")


def mapped_bytes() -> int:
    """Return the resident memory of mapped files, mostly code; 0 where the system does not report it."""
    return _status("RssFile") or 0


def _status(name: str) -> int | None:
    """Read a field of /proc/self/status, in bytes; None where there is none."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


class ActivationCounter(TorchDispatchMode):
    """A context that records the storage of every tensor that an operation returns, to sum those still alive.

    Slow (every operation calls Python) and exact: views share a storage, and storages that checkpointing drops are not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        # Weak references: the counter must keep nothing alive.
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = _plain(tensor).untyped_storage()
            # A freed storage's address may be reused: the entry is then the newer storage's.
            self._made[object_address(storage)] = weakref.ref(storage)
        return result

    def alive_bytes(self, *excluded: Storages) -> int:
        """Return the bytes of storages that were made inside, are still alive, and are in none of ``excluded``."""
        storages = (reference() for reference in self._made.values())
        alive = {_address(s): s.nbytes() for s in storages if s is not None and not any(s in kind for kind in excluded)}
        return sum(alive.values())


def _address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's memory; for fake and meta tensors, that of its C++ object."""
    return object_address(storage) if storage.device.type == "meta" else storage.data_ptr()


def _plain(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result, which may be nested tuples and lists."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from tensors_of(item)
