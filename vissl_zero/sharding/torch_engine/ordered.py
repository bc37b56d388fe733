"""Means over ranks whose sum always runs in the order of ranks: what makes levels agree bit for bit.

A library's all-reduce and reduce-scatter add up in an order that depends on sizes, places and algorithms, and float
addition is not associative. Here every rank receives all parts of the elements it is to reduce and adds them, rank 0's
first; so an element's mean does not depend on what else travels with it. It moves as many bytes as a reduce-scatter.
Sharded gradients on the CPU go through ``sharding/cpu_comm``, which adds up in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from vissl_zero import collectives
from vissl_zero.sharding.cpu_comm.communicator import add_in_order
from vissl_zero.sharding.torch_private import real_grad, set_real_grad


class OrderedReduceScatter(ReduceScatter):
    """For ``FSDPModule.set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; see the module."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        # Asked for a sum, torch divides by itself.
        add_in_order(received.view(group.size(), -1).unbind(), output_tensor, is_mean=op == dist.ReduceOp.AVG)


class OrderedMeans:
    """Averages the gradients of full parameters over all ranks after each micro-batch, and adds them up.

    Sharded gradients are averaged in every micro-batch too, so the sums over micro-batches run in one order.

    Args:
        params: the same on every rank.
    """

    def __init__(self, params: Sequence[nn.Parameter]):
        self._params = [param for param in params if param.requires_grad]

    @contextmanager
    def micro_batch(self, is_last: bool = True) -> Iterator[None]:
        """Around forward and backward of one micro-batch. Collective at its end: an all-to-all and an all-gather."""
        earlier = [real_grad(param) for param in self._params]
        for param in self._params:
            set_real_grad(param, None)
        yield
        self._average()
        for param, grad in zip(self._params, earlier, strict=True):
            if grad is not None:
                added = real_grad(param)
                set_real_grad(param, grad if added is None else grad.add_(added))

    @torch.no_grad()
    def _average(self) -> None:
        """A gradient that only some ranks have is zero on the others."""
        world_size = collectives.world_size()
        if world_size == 1 or not self._params:
            return
        present = torch.tensor([real_grad(param) is not None for param in self._params], device=self._params[0].device)
        # Ranks must agree on the list first: the exchange below needs equal sizes everywhere.
        used = collectives.all_reduce_max(present.to(torch.uint8)).tolist()
        chosen = [param for param, is_used in zip(self._params, used, strict=True) if is_used]
        if not chosen:
            return
        found = [(param, real_grad(param)) for param in chosen]
        grads = [torch.zeros_like(param) if grad is None else grad for param, grad in found]
        sizes = [grad.numel() for grad in grads]
        # Padded so that each rank sums an equal share.
        flat = grads[0].new_zeros(-(-sum(sizes) // world_size) * world_size)
        torch.cat([grad.reshape(-1) for grad in grads], out=flat[: sum(sizes)])
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        mine = torch.empty_like(flat[: len(flat) // world_size])
        add_in_order(received.view(world_size, -1).unbind(), mine, is_mean=True)
        dist.all_gather(list(flat.view(world_size, -1).unbind()), mine)
        for param, part in zip(chosen, flat[: sum(sizes)].split(sizes), strict=True):
            set_real_grad(param, part.view(param.shape))
