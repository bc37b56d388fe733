"""How ``fully_shard`` gathers and reduces units on the CPU, in place of gloo's collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from vissl_zero.sharding.cpu_comm.communicator import CpuCommunicator

_MEANS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class Tell(Protocol):
    """The signature of ``UnitGuard.tell``."""

    def __call__(self, number: int, *, is_reduce: bool) -> None: ...


def use_communicator(
    units: Sequence[FSDPModule], comm: CpuCommunicator, tell: Tell, keeps_buffers: bool = True
) -> Callable[[], list[Tensor]]:
    """Make ``units`` communicate through ``comm``, and gather each when it is needed and not before.

    Fetching ahead hides the time of a network. Here gathering is copying, by the core that would compute meanwhile, and
    a unit fetched ahead is one more in memory.

    Args:
        units: of one model; their places here are their numbers.
        comm: among the ranks that share it.
        tell: called before each message with the number of its unit.
        keeps_buffers: for the next unit; False where memory is dearer than the time to have it cleared.
    Returns:
        A function that lists the buffers they have taken so far.
    """
    buffer = _Buffer(keeps_buffers)
    for number, unit in enumerate(units):
        gather, reduce = _AllGather(comm, buffer, number, tell), _ReduceScatter(comm, buffer, number, tell)
        # torch's own base classes have private names, and ask for no more than these two methods
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch([unit])  # an empty list would mean: the default
    return lambda: list(buffer.by_dtype.values())


class _Buffer:
    """One buffer per dtype that grows to the largest size asked for.

    It serves all units in turn, for gathering and for reducing: each has left it before the next one needs it.
    """

    def __init__(self, is_kept: bool):
        self._is_kept = is_kept
        self.by_dtype: dict[torch.dtype, Tensor] = {}

    def get(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first elements of the buffer; whatever it held is lost."""
        if not self._is_kept:
            return torch.empty(*size, dtype=dtype)
        numel = math.prod(size)
        buffer = self.by_dtype.get(dtype)
        if buffer is None or buffer.numel() < numel:
            self.by_dtype[dtype] = buffer = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(*size)


class _AllGather:
    def __init__(self, comm: CpuCommunicator, buffer: _Buffer, number: int, tell: Tell):
        self._comm, self._buffer, self._number, self._tell = comm, buffer, number, tell

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffer.get(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._tell(self._number, is_reduce=False)
        self._comm.all_gather(output_tensor, input_tensor)


class _ReduceScatter:
    """``fully_shard`` asks for the input, then for the output, which lives on as the gradient."""

    def __init__(self, comm: CpuCommunicator, buffer: _Buffer, number: int, tell: Tell):
        self._comm, self._buffer, self._number, self._tell = comm, buffer, number, tell
        self._is_output_next = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_output, self._is_output_next = self._is_output_next, not self._is_output_next
        return torch.empty(*size, dtype=dtype) if is_output else self._buffer.get(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in _MEANS, op
        self._tell(self._number, is_reduce=True)
        self._comm.reduce_scatter(output_tensor, input_tensor, is_mean=op == dist.ReduceOp.AVG)
