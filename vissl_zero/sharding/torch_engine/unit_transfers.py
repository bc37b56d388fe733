"""How ``fully_shard`` gathers and reduces units on the CPU, in place of gloo's collectives.

If a unit's shards are on disk, they are read before the all-gather, and gradients are spilled after the backward pass.
``fully_shard`` has no hook at these moments (2.11 to 2.13), so three methods of the unit's parameter group are
extended on the object: ``unshard`` and ``wait_for_unshard``, between which shards are read, and ``post_backward``,
after which they have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from vissl_zero.sharding.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.offload.layout import StoredParam
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.wrap_plan import WrapPlan

_MEANS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class Tell(Protocol):
    """The signature of ``UnitGuard.tell``."""

    def __call__(self, number: int, *, is_reduce: bool) -> None: ...


def use_communicator(
    units: Sequence[FSDPModule], comm: CpuCommunicator, tell: Tell, keeps_buffers: bool = True
) -> Callable[[], list[Tensor]]:
    """Make ``units`` communicate through ``comm``, and gather each only when it is needed.

    Fetching ahead hides the time of a network. Here gathering is a copy by the same core that computes, and a unit
    fetched ahead would occupy more memory.

    Args:
        units: of one model; their places here are their numbers.
        comm: among the ranks that share it.
        tell: called before each message with the number of its unit.
        keeps_buffers: keep buffers for the next unit; False where memory matters more than the time to clear it.
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
        self.is_kept = is_kept
        self.by_dtype: dict[torch.dtype, Tensor] = {}

    def get(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first elements of the buffer; whatever it held is lost."""
        if not self.is_kept:
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

    def unused(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory of ``numel`` elements for what this rank is about to send, or None if there is none to spare.

        It is another rank's part of the buffer: overwritten when the message arrives, which is after it was sent.

        Args:
            numel: of all that this rank sends in the next gather.
            dtype: of it.
        """
        num_ranks = self._comm.num_ranks
        if not self._buffer.is_kept or num_ranks == 1:
            return None
        return self._buffer.get((num_ranks, numel), dtype)[(self._comm.rank + 1) % num_ranks]

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


class UnitOnDisk:
    """Keeps the shards of one unit in a store, except while they are being gathered.

    Args:
        unit: just wrapped, with its shards in memory; those that the store knows are moved there.
        position: of the unit in the store.
        names: full names of the unit's parameters, by the parameter as the model holds it now.
        store: of the shards.
    """

    def __init__(self, unit: nn.Module, position: int, names: dict[nn.Parameter, str], store: ParameterStore):
        self._position = position
        self._store = store
        self._group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        params = [] if self._group is None else self._group.fsdp_params
        indices = {store.layout.index_of.get(names[param.sharded_param]): param for param in params}
        self._params: dict[int, Any] = {index: param for index, param in indices.items() if index is not None}
        if self._group is not None and self._group.device.type == "cpu":
            # A gather on the CPU overlaps with nothing, and would take the memory of a second unit. On every rank, also
            # one that holds nothing of this unit: all must gather in one order.
            self._group._backward_prefetch = self._forget_order
        if not self._params:
            return
        store.write({index: param._sharded_param_data for index, param in self._params.items()})
        for param in self._params.values():
            # The model keeps only the shape: a read outside of a gather must fail, not give old values.
            param.sharded_param._local_tensor = param.sharded_param._local_tensor.to("meta")
        self._drop()
        group = self._group
        self._unshard, self._wait, self._post_backward = group.unshard, group.wait_for_unshard, group.post_backward
        group.unshard, group.wait_for_unshard, group.post_backward = self.unshard, self.wait, self.post_backward

    def unshard(self, async_op: bool = False) -> None:
        """Read the shards, then gather them."""
        # In the other cases torch returns at once and gathers nothing, so nothing must be read.
        if self._group._all_gather_result is None and not self._group.is_unsharded:
            self._fetch()
        self._unshard(async_op)

    def wait(self) -> None:
        """When they have been gathered, drop the shards."""
        self._wait()
        self._drop()
        if self._group.device.type == "cpu":
            self._group.comm_ctx.all_gather_state = None  # kept for the sake of a stream

    def post_backward(self, *unused: Any) -> None:
        """When gradients have been reduced, move them to the disk."""
        self._post_backward(*unused)
        if self._group.device.type == "cpu":
            self._group.comm_ctx.reduce_scatter_states.clear()  # kept for the sake of a stream
        grads: dict[int, Tensor] = {}
        for index, param in self._params.items():
            if (grad := param.sharded_param.grad) is not None:
                if param.grad_offload_event is not None:
                    # The copy to the host may be under way still.
                    param.grad_offload_event.synchronize()
                    param.grad_offload_event = None
                grads[index] = grad.to_local().reshape(-1)
                param.sharded_param.grad = None
        if grads:
            self._store.add_grads(grads)

    def _fetch(self) -> None:
        outs = {}
        room, first = self._unused_memory(), 0
        for index, param in self._params.items():
            numel = param.padded_sharded_param_size.numel()
            data = torch.empty(numel, dtype=param.orig_dtype) if room is None else room[first : first + numel]
            first += numel
            # torch gathers parts of equal length; beyond this rank's rows lies padding.
            data[self._store.layout.params[index].num_elements :].zero_()
            outs[index] = param._sharded_param_data = data
        self._store.fetch(self._position, outs)

    def _unused_memory(self) -> Tensor | None:
        """Room for all shards that saves the clearing of fresh pages, or None."""
        gather, params = self._group._all_gather_comm, self._group.fsdp_params
        dtype = params[0].orig_dtype
        # Elsewhere the message has another format, or is not made of these shards alone.
        if not isinstance(gather, _AllGather) or any(
            (p.param_dtype or dtype, p.orig_dtype) != (dtype,) * 2 for p in params
        ):
            return None
        return gather.unused(sum(param.padded_sharded_param_size.numel() for param in params), dtype)

    def _drop(self) -> None:
        for param in self._params.values():
            if not param._sharded_param_data.is_meta:
                param._sharded_param_data = torch.empty_like(param._sharded_param_data, device="meta")

    def _forget_order(self) -> None:
        # torch's own prefetch takes an entry out here too; without that the list would grow with every pass.
        if self._group._post_forward_indices:
            self._group._post_forward_indices.pop()


def stored_params(
    module: nn.Module, wrap_plan: WrapPlan, trained: set[str], mesh: DeviceMesh
) -> list[list[StoredParam]]:
    """The shards of each unit that ``fully_shard`` will cut, before it has cut them.

    Args:
        module: not yet wrapped; may be on the meta device.
        wrap_plan: its units.
        trained: full names of the parameters that the optimizer updates.
        mesh: of the ranks.
    """
    num_shards, shard_index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    names = {param: name for name, param in module.named_parameters()}
    taken: set[nn.Parameter] = set()
    units = []
    for unit in wrap_plan.units:
        own = [param for name in unit.modules for param in module.get_submodule(name).parameters()]
        own = [param for param in dict.fromkeys(own) if param not in taken and param.dim() and param.numel()]
        taken |= set(own)
        units.append(
            [
                StoredParam(
                    names[param], _num_local(param, num_shards, shard_index), param.dtype, names[param] in trained
                )
                for param in own
            ]
        )
    return units


def _num_local(param: Tensor, num_shards: int, shard_index: int) -> int:
    """Elements of this rank's rows, dealt as ``torch.chunk`` does."""
    rows_each = -(-param.shape[0] // num_shards)
    num_rows = min(max(param.shape[0] - shard_index * rows_each, 0), rows_each)
    return num_rows * param.shape[1:].numel()
