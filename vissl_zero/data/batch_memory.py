"""Memory in which loader workers hand over batches: mapped by both processes, and used again.

Fresh shared memory costs more than the augmentation of what it holds: the kernel clears each of its pages, and either
process faults on each of them. So a worker keeps its blocks. The first byte of a block is 1 while the training process
has a tensor in it; that process writes 0 when the last tensor is freed, whoever held it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.resource_sharer import DupFd
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from vissl_zero.data.dataset import Loaded

_HEADER_BYTES = 64  # the byte that says whether it is in use, and a cache line for itself
_LEAST_BYTES = 2**16  # smaller tensors travel with the message
# In the training process: its view of each block, by the worker's process id and the block's number.
_opened: dict[int, dict[int, np.ndarray[Any, Any]]] = {}


@dataclass
class _Block:
    """Memory of a worker; see the module.

    Attributes:
        number: it is told apart by.
        memory: header and contents, (bytes,) uint8.
        descriptor: of the file without a name that it lies in.
        is_sent: the training process has its descriptor.
    """

    number: int
    memory: np.ndarray[Any, Any]
    descriptor: int
    is_sent: bool = False


class BatchSender:
    """A worker's side: allocates the tensors of a batch and packs them."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._num_made = 0
        self._unsent: dict[int, _Block] = {}  # by the address of the tensor in it
        self._dropped: list[int] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a tensor, a large one in a block, which is the training process's once ``pack`` has sent it."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(*shape, dtype=dtype)
        block = self._free_block(num_bytes)
        block.memory[0] = 1
        tensor = _tensor(block.memory, shape, dtype)
        self._unsent[tensor.data_ptr()] = block
        return tensor

    def pack(self, loaded: Loaded) -> PackedBatch:
        """Pack what was loaded. Tensors that are large, but not in a block, are copied into one."""
        sent: list[_Block] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file)

        def described(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            if value.data_ptr() not in self._unsent:
                if value.nbytes < _LEAST_BYTES:
                    return value.numpy()
                value = self.empty(value.shape, value.dtype).copy_(value)
            block = self._unsent.pop(value.data_ptr())
            sent.append(block)
            return block.number, tuple(value.shape), value.dtype

        pickler.persistent_id = described  # type: ignore[method-assign]
        pickler.dump(loaded)
        new = {block.number: DupFd(block.descriptor) for block in sent if not block.is_sent}
        for block in sent:
            block.is_sent = True
        dropped, self._dropped = self._dropped, []
        return PackedBatch(os.getpid(), file.getvalue(), new, dropped)

    def reclaim(self) -> None:
        """Take back the blocks of a batch that was not sent: its loading has failed."""
        for block in self._unsent.values():
            block.memory[0] = 0
        self._unsent.clear()

    def _free_block(self, num_bytes: int) -> _Block:
        """Return the smallest free block that is large enough; a new one in place of a smaller one if there is none."""
        free = [block for block in self._blocks if not block.memory[0]]
        fitting = [block for block in free if len(block.memory) >= _HEADER_BYTES + num_bytes]
        if fitting:
            return min(fitting, key=lambda block: len(block.memory))
        if free:
            too_small = max(free, key=lambda block: len(block.memory))
            self._blocks.remove(too_small)
            os.close(too_small.descriptor)
            self._dropped.append(too_small.number)
        descriptor = os.memfd_create("vissl-zero batch")  # no room in /dev/shm is needed, and nothing is left behind
        os.ftruncate(descriptor, _HEADER_BYTES + num_bytes)
        self._num_made += 1
        self._blocks.append(_Block(self._num_made, _mapped(descriptor), descriptor))
        return self._blocks[-1]


@dataclass
class PackedBatch:
    """What a worker sends.

    Attributes:
        pid: process of the worker.
        data: the pickled ``Loaded``, in which tensors are (number of a block, shape, dtype), small ones arrays.
        new: descriptors of blocks that the training process has not seen.
        dropped: numbers of blocks that the worker has given up.
    """

    pid: int
    data: bytes
    new: dict[int, DupFd]
    dropped: list[int]

    def unpack(self) -> Loaded:
        """Return what was loaded, its tensors in the worker's memory until they are freed.

        Not in a thread that must not wait: it asks the worker for new descriptors.
        """
        blocks = _opened.setdefault(self.pid, {})
        for number, duplicate in self.new.items():
            descriptor = duplicate.detach()
            blocks[number] = _mapped(descriptor)
            os.close(descriptor)
        for number in self.dropped:
            blocks.pop(number, None)  # tensors in it keep it mapped
        unpickler = pickle.Unpickler(io.BytesIO(self.data))  # noqa: S301 - our own worker's
        unpickler.persistent_load = lambda value: _received(value, blocks)  # type: ignore[method-assign]
        loaded: Loaded = unpickler.load()
        return loaded

    def pin_memory(self) -> Loaded:
        """Copy the batch to page-locked memory, for torch's DataLoader, which does so in a thread."""
        return self.unpack().pin_memory()


def forget_blocks(pids: Iterable[int]) -> None:
    """Let go of the memory of workers that have ended; tensors in it keep it mapped."""
    for pid in pids:
        _opened.pop(pid, None)


def _received(value: Any, blocks: dict[int, np.ndarray[Any, Any]]) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    number, shape, dtype = value
    memory = blocks[number]
    # An array of its own, which the storage of the tensor holds, and so does all that shares the storage.
    array = memory[:]
    finalize(array, _give_back, memory).atexit = False
    return _tensor(array, shape, dtype)


def _give_back(memory: np.ndarray[Any, Any]) -> None:
    memory[0] = 0


def _tensor(memory: np.ndarray[Any, Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    end = _HEADER_BYTES + int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(memory)[_HEADER_BYTES:end].view(dtype).view(*shape)


def _mapped(descriptor: int) -> np.ndarray[Any, Any]:
    # Not with Python's mmap, which keeps a descriptor of its own for each mapping.
    file, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    array: np.ndarray[Any, Any] = torch.from_file(file, shared=True, size=size, dtype=torch.uint8).numpy()
    return array
