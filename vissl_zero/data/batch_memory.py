"""Shared memory in which loader workers send batches, and the messages that describe its contents.

A worker and the training process map the same blocks, which a worker keeps and uses again: fresh shared memory costs
more than the augmentation of its contents, because the kernel clears each page and both processes fault on it. The
first byte of a block is 1 while the training process has a tensor in it. The training process writes 0 when the last
tensor is freed.
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

_HEADER_BYTES = 64  # one byte is used; a whole cache line keeps the tensor aligned
_LEAST_BYTES = 2**16  # smaller tensors are pickled into the message


@dataclass
class _Block:
    """Memory of a worker; see the module.

    Attributes:
        number: unique number within the worker.
        memory: header and contents, (bytes,) uint8.
        descriptor: file descriptor of the memfd.
        is_sent: whether the training process has the descriptor.
    """

    number: int
    memory: np.ndarray[Any, Any]
    descriptor: int
    is_sent: bool = False


class BatchSender:
    """The worker's end of the connection: allocates the tensors of a batch, and sends the batch.

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
        """Allocate a tensor, a large one in a block. After ``send``, only the training process may use the block."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(*shape, dtype=dtype)
        block = self._free_block(num_bytes)
        # Taken. The training process clears the byte when no view of the tensor is left.
        block.memory[0] = 1
        tensor = _tensor(block.memory, shape, dtype)
        self._unsent[tensor.data_ptr()] = block
        return tensor

    def send(self, answer: Any) -> None:
        """Send an answer. Large tensors that are not in a block are copied into one."""
        sent: list[_Block] = []
        message = io.BytesIO()
        pickler = pickle.Pickler(message)

        def described(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            if value.data_ptr() not in self._unsent:
                if value.nbytes < _LEAST_BYTES:
                    return value.numpy()
                # A transform of the user's may return a tensor of its own memory.
                value = self.empty(value.shape, value.dtype).copy_(value)
            block = self._unsent.pop(value.data_ptr())
            sent.append(block)
            return block.number, tuple(value.shape), value.dtype

        pickler.persistent_id = described  # type: ignore[method-assign]
        dropped, self._dropped = self._dropped, []
        pickler.dump((dropped, answer))
        # The message before its descriptors: the receiver asks for each when it meets a block that it does not know.
        self._connection.send_bytes(message.getbuffer())
        for block in sent:
            if not block.is_sent:
                send_handle(self._connection, block.descriptor, None)
                block.is_sent = True
        # What remains belongs to a batch whose loading has failed.
        while self._unsent:
            self._unsent.popitem()[1].memory[0] = 0

    def _free_block(self, num_bytes: int) -> _Block:
        """Return the smallest free block that is large enough, else a new block, which replaces a smaller free one."""
        free = [block for block in self._blocks if not block.memory[0]]
        fitting = [block for block in free if len(block.memory) >= _HEADER_BYTES + num_bytes]
        if fitting:
            # The smallest, so that a large block stays free for the large crops.
            return min(fitting, key=lambda block: len(block.memory))
        if free:
            too_small = max(free, key=lambda block: len(block.memory))
            self._blocks.remove(too_small)
            # It is free: the training process has no tensor in it, and drops its mapping when it reads the number.
            os.close(too_small.descriptor)
            self._dropped.append(too_small.number)
        # A memfd needs no space in /dev/shm, which is small in containers, and leaves no file after a kill.
        descriptor = os.memfd_create("vissl-zero batch")
        os.ftruncate(descriptor, _HEADER_BYTES + num_bytes)
        self._num_made += 1
        self._blocks.append(_Block(self._num_made, _mapped(descriptor), descriptor))
        return self._blocks[-1]


class BatchReceiver:
    """The training process's end of the connection. A block's descriptor follows the first message that names it.

    Args:
        connection: a socket to the worker's ``BatchSender``.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}

    def set_timeout(self, seconds: float) -> None:
        """Limit how long ``receive`` waits for the worker, in seconds; 0: no limit."""
        # On the socket: Connection.poll sees the start of a message only, and a worker may stop in the middle of one.
        timeval = struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def receive(self) -> Any:
        """Return the next answer, whose tensors use the worker's memory until they are freed.

        Raises:
            BlockingIOError: the worker has sent nothing, or has stopped in the middle, for as long as the timeout.
            EOFError, OSError: the worker has ended.
        """
        unpickler = pickle.Unpickler(io.BytesIO(self._connection.recv_bytes()))  # noqa: S301 - our own worker's
        unpickler.persistent_load = self._tensor  # type: ignore[method-assign]
        dropped, answer = unpickler.load()
        for number in dropped:
            self._blocks.pop(number, None)  # its tensors keep the mapping alive
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
        # A new array object for each tensor. The tensor's storage refers to it, so the block is free exactly when no
        # view of the tensor is left.
        array = memory[:]
        # Not at exit, when no worker needs the block any more.
        finalize(array, _give_back, memory).atexit = False
        return _tensor(array, shape, dtype)


def _give_back(memory: np.ndarray[Any, Any]) -> None:
    memory[0] = 0


def _tensor(memory: np.ndarray[Any, Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=_HEADER_BYTES).view(*shape)


def _mapped(descriptor: int) -> np.ndarray[Any, Any]:
    # Python's mmap would keep a duplicate descriptor for each mapping.
    file, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    array: np.ndarray[Any, Any] = torch.from_file(file, shared=True, size=size, dtype=torch.uint8).numpy()
    return array
