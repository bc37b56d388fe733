"""What ``fully_shard`` gathers and reduces a unit with on the CPU, in the place of gloo's collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from vissl_zero.sharding.exchange.exchange import Exchange

_MEANS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def use_exchange(
    units: Sequence[FSDPModule], exchange: Exchange, keeps_buffers: bool = True
) -> Callable[[], list[Tensor]]:
    """Make ``units`` communicate through ``exchange``, and gather each when it is needed and not before.

    Fetching ahead hides the time of a network. Here gathering is copying, by the core that would compute meanwhile, and
    a unit fetched ahead is one more in memory.

    Args:
        units: of one model.
        exchange: among the ranks that share it.
        keeps_buffers: for the next unit; False where memory is dearer than the time to have it cleared.
    Returns:
        A function that lists the buffers they have taken so far.
    """
    gather, reduce = _AllGather(exchange, keeps_buffers), _ReduceScatter(exchange, keeps_buffers)
    for unit in units:
        # torch's own base classes have private names, and ask for no more than these two methods
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch([unit])  # an empty list would mean: the default
    return lambda: [*gather.buffers.values(), *reduce.buffers.values()]


class _Buffer:
    """One buffer per dtype that grows to the largest size asked for.

    It serves all units in turn: each is copied out of it before the next one is gathered, or reduced.
    """

    def __init__(self, exchange: Exchange, keeps_buffers: bool):
        self._exchange = exchange
        self._keeps_buffers = keeps_buffers
        self.buffers: dict[torch.dtype, Tensor] = {}

    def _reused(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self._keeps_buffers:
            return torch.empty(*size, dtype=dtype)
        numel = math.prod(size)
        buffer = self.buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            self.buffers[dtype] = buffer = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(*size)


class _AllGather(_Buffer):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._reused(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._exchange.all_gather(output_tensor, input_tensor)


class _ReduceScatter(_Buffer):
    """``fully_shard`` asks for the input, then for the output, which lives on as the gradient."""

    def __init__(self, exchange: Exchange, keeps_buffers: bool):
        super().__init__(exchange, keeps_buffers)
        self._is_output_next = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_output, self._is_output_next = self._is_output_next, not self._is_output_next
        return torch.empty(*size, dtype=dtype) if is_output else self._reused(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in _MEANS, op
        self._exchange.reduce_scatter(output_tensor, input_tensor, is_mean=op == dist.ReduceOp.AVG)
