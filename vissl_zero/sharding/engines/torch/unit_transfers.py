"""Collectives of ``fully_shard`` on the CPU, in place of gloo's.

Weights of float8 layers can travel in float8, on GPUs too: then a message is packed, see ``Packing``.

If a unit's shards are on disk, they are read before the all-gather, and gradients are spilled after the backward pass.
``fully_shard`` has no hook at these moments (2.11 to 2.13), so three methods of the unit's parameter group are
extended on the object: ``unshard`` and ``wait_for_unshard``, between which shards are read, and ``post_backward``,
after which they have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from vissl_zero.collectives import all_gather_into
from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.model.float8 import Rows, packed, unpacked
from vissl_zero.sharding.model.wrap_plan import WrapPlan
from vissl_zero.sharding.offload.layout import StoredParam
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.state.sharded_tensor import WHOLE_LEVELS
from vissl_zero.sharding.torch_private import (
    forget_reduced,
    gather_of,
    group_of,
    is_being_gathered,
    local_tensor,
    set_local_tensor,
    set_real_grad,
    set_shard_data,
    shard_data,
    unit_state,
)

_MEANS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class Announce(Protocol):
    """The signature of ``UnitGuard.announce``."""

    def __call__(self, number: int, *, is_reduce: bool) -> None: ...


def use_communicator(
    units: Sequence[FSDPModule],
    comm: CpuCommunicator,
    announce: Announce,
    keeps_buffers: bool,
    sent: Collection[nn.Parameter],
) -> Callable[[], list[Tensor]]:
    """Make ``units`` communicate through ``comm``, and gather each only when it is needed.

    Fetching ahead hides the time of a network. Here gathering is a copy by the same core that computes, and a unit
    fetched ahead would occupy more memory.

    Args:
        units: units of one model; their places here are their numbers.
        comm: communicator of the ranks that share the model.
        announce: called before each message with the number of its unit.
        keeps_buffers: keep buffers for the next unit; False where memory matters more than the time to clear pages.
        sent: parameters that are sent in float8.
    Returns:
        A function that lists the buffers allocated so far.
    """
    buffer = _Buffer(keeps_buffers)
    for number, unit in enumerate(units):
        packing = packing_of(unit, sent)
        gather, reduce = (
            _AllGather(comm, buffer, number, announce, packing),
            _ReduceScatter(comm, buffer, number, announce),
        )
        # torch's base classes have private names; it calls no methods but ``allocate`` and ``__call__``.
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
        # Prefetching itself is a no-op and turns the default off, which an empty list would leave on.
        unit.set_modules_to_backward_prefetch([unit])
    return lambda: list(buffer.by_dtype.values())


class _Buffer:
    """One buffer per dtype that grows to the largest size requested.

    All units use it in turn, to gather and to reduce: a unit is done with it before the next unit needs it.
    """

    def __init__(self, is_kept: bool):
        self.is_kept = is_kept
        self.by_dtype: dict[torch.dtype, Tensor] = {}

    def get(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the first elements of the buffer as a tensor of ``size``; its previous contents are lost."""
        if not self.is_kept:
            return torch.empty(*size, dtype=dtype)
        numel = math.prod(size)
        buffer = self.by_dtype.get(dtype)
        if buffer is None or buffer.numel() < numel:
            self.by_dtype[dtype] = buffer = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(*size)


class Packing:
    """The layout of one rank's gather message of a unit: weights of float8 layers in float8, the rest unchanged.

    A message has four sections of bytes: other parameters, float8 values, their scales, and zeros up to whole words.

    Args:
        shapes: padded shapes of a rank's part of each parameter, in order; equal on every rank.
        is_float8: whether each parameter is sent in float8.
    """

    _WORD = 16  # bytes; a multiple of every itemsize, so that the message of each rank is aligned for any dtype

    def __init__(self, shapes: Sequence[torch.Size], is_float8: Sequence[bool]):
        self._shapes, self._is_float8 = shapes, is_float8
        self._matrices = [shape for shape, is_sent in zip(shapes, is_float8, strict=True) if is_sent]

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of a rank's message; elements of parameters not in float8 have ``itemsize`` bytes."""
        return sum(self._sizes(itemsize))

    def pack(self, part: Tensor, message: Tensor) -> None:
        """Pack ``part`` (m,), a rank's elements of all parameters, into ``message`` (num_bytes,), uint8."""
        wide, float8 = self._by_format(part)
        rows = [packed(weight) for weight in float8]
        *places, rest = message.split(self._sizes(part.element_size()))
        # Scales are powers of two, which e8m0 holds exactly in one byte.
        pieces = [*wide, *(values for values, _ in rows), *(scales.to(torch.float8_e8m0fnu) for _, scales in rows)]
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece.flatten().view(torch.uint8))
        rest.zero_()

    def unpack(self, messages: Tensor, parts: Tensor) -> None:
        """Unpack the ``messages`` (n, num_bytes) of n ranks into their ``parts`` (n, m)."""
        wide, float8 = self._by_format(parts)
        pieces = iter(messages.split(self._sizes(parts.element_size()), dim=1))
        for out in wide:
            out.copy_(next(pieces).view(parts.dtype))
        values = [next(pieces).view(torch.float8_e4m3fn).unflatten(1, out.shape[1:]) for out in float8]
        for out, of_weight in zip(float8, values, strict=True):
            unpacked(Rows(of_weight, next(pieces).view(torch.float8_e8m0fnu)[..., None]), out)

    def _by_format(self, parts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Split (..., m) into views: parameters sent unchanged (..., k), and float8 weights (..., rows, k)."""
        pieces = list(zip(parts.split([shape.numel() for shape in self._shapes], dim=-1), self._is_float8, strict=True))
        weights = [piece for piece, is_sent in pieces if is_sent]
        return (
            [piece for piece, is_sent in pieces if not is_sent],
            [weight.unflatten(-1, shape) for weight, shape in zip(weights, self._matrices, strict=True)],
        )

    def _sizes(self, itemsize: int) -> list[int]:
        """List the bytes of a message's pieces: full parameters, float8 values, a scale exponent a row, padding."""
        wide = [
            s.numel() * itemsize for s, is_float8 in zip(self._shapes, self._is_float8, strict=True) if not is_float8
        ]
        sizes = [*wide, *(shape.numel() for shape in self._matrices), *(shape[0] for shape in self._matrices)]
        return [*sizes, -sum(sizes) % self._WORD]


def packing_of(unit: FSDPModule, sent: Collection[nn.Parameter]) -> Packing | None:
    """Plan the layout of a unit's messages; None if it has none of the parameters ``sent``."""
    group = group_of(unit_state(unit))
    params = [] if group is None else group.fsdp_params
    is_float8 = [param.sharded_param in sent for param in params]
    return Packing([param.padded_sharded_param_size for param in params], is_float8) if any(is_float8) else None


def gather_packed(
    packing: Packing, output: Tensor, messages: Tensor, rank: int, gather: Callable[[Tensor, Tensor], Any]
) -> None:
    """Gather ``output`` (N * m,), which has this rank's part already, by packed messages. Collective.

    This rank's part stays unrounded, because ``UnitGuard`` compares it with the shard. Its layers round it before use,
    to the values that the other ranks receive.

    Args:
        packing: layout of a message.
        output: all ranks' parts.
        messages: scratch memory (N, num_bytes), uint8.
        rank: position of this rank.
        gather: called with all messages, flat, to be filled, and this rank's message, a view of them.
    """
    parts = output.view(len(messages), -1)
    packing.pack(parts[rank], messages[rank])
    gather(messages.flatten(), messages[rank])
    for others in (slice(0, rank), slice(rank + 1, None)):
        packing.unpack(messages[others], parts[others])


class PackedAllGather:
    """All-gather of a unit's packed messages on GPUs. It runs on the current stream."""

    def __init__(self, packing: Packing):
        self._packing = packing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the gathered output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        gather = partial(all_gather_into, group=group)
        # A unit of several dtypes, as bytes; see ``_AllGather``.
        if output_tensor.dtype == torch.uint8:
            gather(output_tensor, input_tensor)
            return
        num_bytes = self._packing.num_bytes(output_tensor.element_size())
        messages = output_tensor.new_empty(group.size(), num_bytes, dtype=torch.uint8)
        gather_packed(self._packing, output_tensor, messages, group.rank(), gather)


class _AllGather:
    def __init__(
        self, comm: CpuCommunicator, buffer: _Buffer, number: int, announce: Announce, packing: Packing | None = None
    ):
        self._comm, self._buffer, self._number, self._announce_message, self._packing = (
            comm,
            buffer,
            number,
            announce,
            packing,
        )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffer.get(size, dtype)

    def unused(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return scratch memory for the elements that this rank sends in the next gather; None if there is none.

        It is another rank's part of the buffer, which that rank's message overwrites after this rank's was sent.

        Args:
            numel: elements that this rank sends.
            dtype: their data type.
        """
        num_ranks = self._comm.num_ranks
        if not self._buffer.is_kept or num_ranks == 1:
            return None
        return self._buffer.get((num_ranks, numel), dtype)[(self._comm.rank + 1) % num_ranks]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        # Before the data: ranks that run different units must raise before they mix messages of equal size.
        self._announce_message(self._number, is_reduce=False)
        # torch sends a unit of several dtypes as bytes, in which parameters cannot be told apart.
        if self._packing is None or output_tensor.dtype == torch.uint8:
            self._comm.all_gather(output_tensor, input_tensor)
            return
        size = self._comm.num_ranks, self._packing.num_bytes(output_tensor.element_size())
        messages = self._buffer.get(size, torch.uint8)
        gather_packed(self._packing, output_tensor, messages, self._comm.rank, self._comm.all_gather)


class _ReduceScatter:
    """Reduce-scatter of a unit. ``fully_shard`` allocates the input, then the output, which becomes the gradient.

    Size tells the two apart: the output has 1/N of the elements of the input allocated before it.
    """

    def __init__(self, comm: CpuCommunicator, buffer: _Buffer, number: int, announce: Announce):
        self._comm, self._buffer, self._number, self._announce_message = comm, buffer, number, announce
        self._input_numel: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(size)
        if numel * self._comm.num_ranks == self._input_numel:
            return torch.empty(*size, dtype=dtype)
        self._input_numel = numel
        return self._buffer.get(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in _MEANS, op
        # The next allocation is an input again, also if it is smaller than this one.
        self._input_numel = None
        self._require_own_memory(output_tensor)
        self._announce_message(self._number, is_reduce=True)
        self._comm.reduce_scatter(output_tensor, input_tensor, is_mean=op == dist.ReduceOp.AVG)

    def _require_own_memory(self, output: Tensor) -> None:
        """Require that the gradient is not in the shared buffer, which the next unit overwrites."""
        kept = self._buffer.by_dtype.get(output.dtype)
        if kept is not None and kept.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            raise VisslZeroError(
                f"torch {torch.__version__} allocates a unit's gradient before the input of its reduce-scatter, or "
                "with an unexpected size, so the next unit would overwrite it. Use torch 2.11 to 2.13, or "
                f"{WHOLE_LEVELS}. No update was made."
            )


class UnitOnDisk:
    """Keeps the shards of one unit in a store, except while they are being gathered.

    Args:
        unit: just wrapped, with its shards in memory; shards that ``store`` lists are moved there.
        position: position of the unit in the store.
        names: full names of the unit's parameters, by the parameter as the model holds it now.
        store: store of the shards.
    """

    def __init__(self, unit: nn.Module, position: int, names: dict[nn.Parameter, str], store: ParameterStore):
        self._position = position
        self._store = store
        self._group = group_of(unit_state(unit))
        params = [] if self._group is None else self._group.fsdp_params
        indices = {store.layout.index_of.get(names[param.sharded_param]): param for param in params}
        self._params: dict[int, Any] = {index: param for index, param in indices.items() if index is not None}
        if self._group is not None and self._group.device.type == "cpu":
            # Without prefetching: a gather on the CPU overlaps with nothing, and would take a second unit's memory.
            # Also on ranks without a shard of this unit: all must gather in one order.
            cast(Any, unit).set_modules_to_backward_prefetch([unit])  # see use_communicator
        if not self._params:
            return
        store.write({index: shard_data(param) for index, param in self._params.items()})
        for param in self._params.values():
            # The model keeps only the shape: a read outside a gather must raise, not return stale values.
            set_local_tensor(param.sharded_param, local_tensor(param.sharded_param).to("meta"))
        self._drop()
        group = self._group
        self._unshard, self._wait, self._post_backward = group.unshard, group.wait_for_unshard, group.post_backward
        group.unshard, group.wait_for_unshard, group.post_backward = self.unshard, self.wait, self.post_backward

    def unshard(self, async_op: bool = False) -> None:
        """Read the shards, then gather them."""
        # In the other cases torch returns at once and gathers nothing, so nothing must be read.
        if not is_being_gathered(self._group) and not self._group.is_unsharded:
            self._fetch()
        self._unshard(async_op)

    def wait(self) -> None:
        """Wait for the gather, then drop the shards."""
        self._wait()
        self._drop()
        if self._group.device.type == "cpu":
            # torch keeps the gathered buffer until the next gather, to overlap streams. The CPU has none.
            self._group.comm_ctx.all_gather_state = None

    def post_backward(self, *unused: Any) -> None:
        """Reduce the gradients, then move them to the disk."""
        self._post_backward(*unused)
        if self._group.device.type == "cpu":
            forget_reduced(self._group)
        grads: dict[int, Tensor] = {}
        for index, param in self._params.items():
            if (grad := param.sharded_param.grad) is not None:
                if param.grad_offload_event is not None:
                    # CPUOffloadPolicy copies to the host asynchronously.
                    param.grad_offload_event.synchronize()
                    param.grad_offload_event = None
                grads[index] = grad.to_local().reshape(-1)
                # The parameter's own setter would discard the gradient of earlier micro-batches.
                set_real_grad(param.sharded_param, None)
        if grads:
            self._store.add_grads(grads)

    def _fetch(self) -> None:
        outs = {}
        room, first = self._unused_memory(), 0
        for index, param in self._params.items():
            numel = param.padded_sharded_param_size.numel()
            data = torch.empty(numel, dtype=param.orig_dtype) if room is None else room[first : first + numel]
            first += numel
            # torch gathers parts of equal length: behind this rank's rows is padding.
            data[self._store.layout.params[index].num_elements :].zero_()
            set_shard_data(param, data)
            outs[index] = data
        self._store.fetch(self._position, outs)

    def _unused_memory(self) -> Tensor | None:
        """Return reusable memory for all shards of the unit, without fresh pages to clear; None if there is none."""
        gather, params = gather_of(self._group), self._group.fsdp_params
        dtype = params[0].orig_dtype
        # Else the message has another dtype than the shards, or is torch's own on a GPU.
        if not isinstance(gather, _AllGather) or any(
            (p.param_dtype or dtype, p.orig_dtype) != (dtype,) * 2 for p in params
        ):
            return None
        return gather.unused(sum(param.padded_sharded_param_size.numel() for param in params), dtype)

    def _drop(self) -> None:
        for param in self._params.values():
            if not shard_data(param).is_meta:
                set_shard_data(param, torch.empty_like(shard_data(param), device="meta"))


def planned_shards(
    module: nn.Module, wrap_plan: WrapPlan, trained: set[str], mesh: DeviceMesh
) -> list[list[StoredParam]]:
    """Return the shards of each unit that ``fully_shard`` will cut, before it has cut them.

    Args:
        module: not yet wrapped; may be on the meta device.
        wrap_plan: its units.
        trained: full names of the parameters that the optimizer updates.
        mesh: mesh of the ranks.
    """
    num_shards, shard_index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    names = {param: name for name, param in module.named_parameters()}
    taken: set[nn.Parameter] = set()
    units = []
    for unit in wrap_plan.units:
        params = [param for name in unit.modules for param in module.get_submodule(name).parameters()]
        # As ``_wrap``: inner units own tied parameters first; scalars and empty parameters are not sharded.
        params = [param for param in dict.fromkeys(params) if param not in taken and param.dim() and param.numel()]
        taken |= set(params)
        stored = [
            StoredParam(names[param], _num_local(param, num_shards, shard_index), param.dtype, names[param] in trained)
            for param in params
        ]
        units.append([] if unit.is_replicated else stored)
    return units


def _num_local(param: Tensor, num_shards: int, shard_index: int) -> int:
    """Count the elements of this rank's rows, cut as by ``torch.chunk``."""
    rows_each = -(-param.shape[0] // num_shards)
    num_rows = min(max(param.shape[0] - shard_index * rows_each, 0), rows_each)
    return num_rows * param.shape[1:].numel()
