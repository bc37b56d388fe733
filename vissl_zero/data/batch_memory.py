"""Memory in which loader workers hand over batches, and the messages that say what lies in it.

Both processes map the memory, and it is used again. Fresh shared memory costs more than the augmentation of what it
holds: the kernel clears each of its pages, and either process faults on each of them. So a worker keeps its blocks.
The first byte of a block is 1 while the training process has a tensor in it; that process writes 0 when the last tensor
is freed, whoever held it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

_HEADER_BYTES = 64  # the byte that says whether it is in use, and a cache line for itself
_LEAST_BYTES = 2**16  # smaller tensors travel with the message


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
    """A worker's side: allocates the tensors of a batch, and sends it.

    Args:
        connection: a socket to the training process's ``BatchReceiver``.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._blocks: list[_Block] = []
        self._num_made = 0
        self._unsent: dict[int, _Block] = {}  # by the address of the tensor in it
        self._dropped: list[int] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a tensor, a large one in a block, which is the training process's once ``send`` has sent it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(*shape, dtype=dtype)
        block = self._free_block(num_bytes)
        block.memory[0] = 1
        tensor = _tensor(block.memory, shape, dtype)
        self._unsent[tensor.data_ptr()] = block
        return tensor

    def send(self, answer: Any) -> None:
        """Send what was loaded. Tensors that are large, but not in a block, are copied into one."""
        sent: list[_Block] = []
        message = io.BytesIO()
        pickler = pickle.Pickler(message)

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
        dropped, self._dropped = self._dropped, []
        pickler.dump((dropped, answer))
        self._connection.send_bytes(message.getbuffer())
        for block in sent:
            if not block.is_sent:
                send_handle(self._connection, block.descriptor, None)
                block.is_sent = True
        for block in self._unsent.values():  # of a batch whose loading has failed
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


class BatchReceiver:
    """The training process's side of a worker. A new block's descriptor follows the message that first names it.

    Args:
        connection: a socket to the worker's ``BatchSender``.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}

    def set_timeout(self, seconds: float) -> None:
        """Have ``receive`` wait so long at most for the worker; 0: for ever."""
        timeval = struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def receive(self) -> Any:
        """Return what was sent next, its tensors in the worker's memory until they are freed.

        Raises:
            BlockingIOError: the worker has sent nothing, or has stopped in the middle, for as long as the timeout.
            EOFError, OSError: the worker has ended.
        """
        unpickler = pickle.Unpickler(io.BytesIO(self._connection.recv_bytes()))  # noqa: S301 - our own worker's
        unpickler.persistent_load = self._tensor  # type: ignore[method-assign]
        dropped, answer = unpickler.load()
        for number in dropped:
            self._blocks.pop(number, None)  # tensors in it keep it mapped
        return answer

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        number, shape, dtype = value
        if number not in self._blocks:
            descriptor = recv_handle(self._connection)
            self._blocks[number] = _mapped(descriptor)
            os.close(descriptor)
        memory = self._blocks[number]
        # An array of its own, which the storage of the tensor holds, and so does all that shares the storage.
        array = memory[:]
        finalize(array, _give_back, memory).atexit = False
        return _tensor(array, shape, dtype)


def _give_back(memory: np.ndarray[Any, Any]) -> None:
    memory[0] = 0


def _tensor(memory: np.ndarray[Any, Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=_HEADER_BYTES).view(*shape)


def _mapped(descriptor: int) -> np.ndarray[Any, Any]:
    # Not with Python's mmap, which keeps a descriptor of its own for each mapping.
    file, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    array: np.ndarray[Any, Any] = torch.from_file(file, shared=True, size=size, dtype=torch.uint8).numpy()
    return array
