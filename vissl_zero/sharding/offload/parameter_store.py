"""Shards whose values are not on the device: on a disk, or with master copy, gradient and state on the host.

A disk has two files, parameters and gradients, which are streamed through bounded buffers. Backward passes add to the
gradients on the disk; clipping is applied when they are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.offload.block_file import (
    NUM_BUFFERS,
    BlockFile,
    OffloadError,
    OffloadFolder,
    PrefetchOrder,
    ReadAhead,
    RecordPipeline,
)
from vissl_zero.sharding.offload.layout import Layout, StoredParam, TensorFile
from vissl_zero.sharding.state.missing_gradient import ON_DISK, ON_HOST
from vissl_zero.sharding.state.shard import Shard, divide_by_norms, squared_norms
from vissl_zero.sharding.torch_private import set_real_grad


class GradientStore:
    """Gradients of trained shards, on a disk; a shard may have none.

    Changes (unscaling, clipping, adaptation) are noted and applied to the elements that are read, so they cost no pass
    over the file. They are element-wise: the result is the same.

    Args:
        layout, file, pipeline: as for ``TensorFile``.
    """

    def __init__(self, layout: Layout, file: BlockFile, pipeline: RecordPipeline):
        self.records = file
        self._layout = layout
        self._file = TensorFile(layout, file, pipeline)
        self._stored: set[int] = set()
        self._zero: set[int] = set()
        self._squares: dict[int, Tensor] = {}
        self._changes: dict[int, list[tuple[Tensor | float, Tensor | None]]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._stored or index in self._zero

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Add the gradients of a backward pass: flat tensors by index."""

        def is_read(record: int) -> bool:
            # A record without stored gradients is overwritten. Its bytes of other shards are then undefined, but not
            # marked as stored, so never read.
            return any(segment.tensor in self._stored for segment in self._layout.chunks[record].segments)

        def combine(index: int, stored: Tensor, new: Tensor) -> None:
            if index in self._stored:
                stored.add_(new)
            else:
                stored.copy_(new)

        # The next unit is computed while the last records are written.
        self._file.write(grads, is_read, combine, is_behind=True)
        for index, grad in grads.items():
            # Only of a gradient that is complete in memory: a sum of two backward passes is in the file alone, and one
            # of another dtype is rounded there.
            if index in self._stored or grad.dtype != self._layout.params[index].dtype:
                self._squares.pop(index, None)
            else:
                self._squares[index] = squared_norms([grad])[0]
        self._stored |= grads.keys()

    def square(self, index: int) -> Tensor | None:
        """Return the squared norm, 0-d, of the gradient that ``read`` would return; None if the file must be read."""
        return None if index in self._zero or index in self._changes else self._squares.get(index)

    def read(self, index: int, values: Tensor | None = None) -> Tensor:
        """Read one gradient, flat, with the changes made so far.

        Args:
            index: index of a shard that has a gradient.
            values: values of the shard, if a change adds them (``needs_values``).
        """
        grad = self._file.read(index)
        self.apply_changes(index, grad, values)
        return grad

    def needs_values(self, index: int) -> bool:
        """Check whether a noted change adds parameters to the gradient."""
        return any(param_factor is not None for _, param_factor in self._changes.get(index, ()))

    def set_zero(self, index: int) -> None:
        """Note that the gradient is zero, without storing it."""
        self._zero.add(index)

    def change(self, index: int, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """Change the gradient to ``factor * grad + param_factor * param`` from now on."""
        self._changes.setdefault(index, []).append((factor, param_factor))

    def apply_changes(self, index: int, grad: Tensor, values: Tensor | None) -> None:
        """Apply the noted changes to elements of a stored gradient, in place; ``values`` are their parameters."""
        if index in self._zero:
            grad.zero_()
        for factor, param_factor in self._changes.get(index, ()):
            grad.mul_(factor)
            if param_factor is not None:
                assert values is not None
                grad.addcmul_(values, param_factor)

    def forget(self, index: int) -> None:
        """Forget the gradient: there is none any more."""
        self._stored.discard(index)
        self._zero.discard(index)
        self._squares.pop(index, None)
        self._changes.pop(index, None)


class ParameterStore:
    """Values and gradients of shards on a disk; a shard is identified by its index in ``layout``.

    The file of parameters is read ahead, in the order of the last step, as far as the buffers reach. Only the thread
    that trains may call the methods.

    Args:
        units: the shards of each unit, which are fetched together.
        folder: folder of the files; removed with this object, or at the end of the process.
        is_fast_init: leave blocks of the file of gradients untouched until they are first written.
    Attributes:
        layout: layout of both files.
        parameters: file of values; an optimizer changes it inside ``updating`` only.
        gradients: gradients; records of frozen parameters are empty.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(self, units: Sequence[Sequence[StoredParam]], folder: OffloadFolder, is_fast_init: bool):
        self.layout = Layout(units)
        sizes = self.layout.sizes
        trained = [size if self.layout.is_trained(record) else 0 for record, size in enumerate(sizes)]
        self.parameters = folder.file("parameters", sizes, is_touched=False)  # written before training starts
        try:
            gradients = folder.file("gradients", trained, is_touched=not is_fast_init)
        except OffloadError:
            self.parameters.close()  # there is no finalizer yet
            raise
        self.record_bytes = max(sizes, default=0)
        self._pipeline = RecordPipeline([self.record_bytes])
        self._ahead = ReadAhead(self.parameters, self.record_bytes)
        self._values = TensorFile(self.layout, self.parameters, self._pipeline)
        self.gradients = GradientStore(self.layout, gradients, self._pipeline)
        self._order = PrefetchOrder()
        self._is_broken = False
        files = self.parameters, gradients
        self._finalizer = weakref.finalize(self, _end, self._ahead, self._pipeline, files, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """The buffers."""
        return self._ahead.memory + self._pipeline.memory

    @property
    def disk_bytes(self) -> int:
        """Size of the files."""
        return self.parameters.num_bytes + self.gradients.records.num_bytes

    def fetch(self, unit: int, outs: Mapping[int, Tensor]) -> None:
        """Read the parameters of a unit.

        Args:
            unit: position among ``units``.
            outs: flat tensors to fill, by index; may be longer than their shards.
        Raises:
            OffloadError: a record is not what was written, or an earlier update failed.
        """
        self._require_sound()
        records = self.layout.unit_records[unit]
        self._order.came(unit)
        # This unit's records first, then those of the units that followed it in the last step.
        self._ahead.follow([*records, *self._expected_records()])
        for _ in records:
            record, buffer = self._ahead.take()
            for segment in self.layout.chunks[record].segments:
                outs[segment.tensor][segment.start : segment.stop] = self.layout.view(segment, buffer.bytes)
            self._ahead.give_back(buffer)

    def read(self, index: int) -> Tensor:
        """Read one shard's parameters, flat."""
        self._require_sound()
        return self._values.read(index)

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Store parameters: flat tensors by index."""
        self._require_sound()
        self._ahead.forget()  # records that were read ahead have the old values

        def is_read(record: int) -> bool:
            # A record with other shards is read first, to keep their elements.
            return any(segment.tensor not in values for segment in self.layout.chunks[record].segments)

        with self._whole_or_broken():
            self._values.write(values, is_read, lambda _, stored, new: stored.copy_(new))

    def add_grads(self, grads: Mapping[int, Tensor]) -> None:
        """Add the gradients of a backward pass: flat tensors by index."""
        self._require_sound()
        with self._whole_or_broken():
            self.gradients.add(grads)

    def expect_next_step(self) -> None:
        """Begin to read ahead for the next forward pass, after an update by ``write``."""
        self._order.restart()
        self._ahead.follow(self._expected_records())

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Guard an update that writes ``parameters`` directly: if it fails, every later call raises. A context.

        Raises:
            OffloadError: an earlier update failed.
        """
        self._require_sound()
        # Records that were read ahead hold values from before the update.
        self._ahead.forget()
        self._order.restart()
        with self._whole_or_broken():
            self._pipeline.finish()  # the last gradients may still be on their way to the file
            yield
        self._ahead.follow(self._expected_records())

    def close(self) -> None:
        """Remove the files now."""
        self._is_broken = True
        self._finalizer()

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        # Not in ``finally``: an exception leaves the store marked as broken.
        self._is_broken = True
        yield
        self._is_broken = False

    def _expected_records(self) -> list[int]:
        records: list[int] = []
        # Bounded, because the order may repeat forever, and units in memory add no records.
        for unit in islice(self._order.expected(), NUM_BUFFERS):
            if len(records) >= NUM_BUFFERS:
                break
            records += self.layout.unit_records[unit]
        return records

    def _require_sound(self) -> None:
        if self._is_broken:
            raise OffloadError("Streaming of parameters failed earlier or was closed. Resume from the last checkpoint.")


def _end(ahead: ReadAhead, pipeline: RecordPipeline, files: Sequence[BlockFile], folder: OffloadFolder) -> None:
    ahead.close()
    pipeline.close()
    for file in files:
        file.close()
    folder.remove()


@dataclass(eq=False, kw_only=True)
class DiskShard(Shard):
    """A shard on a disk; see ``Shard``. ``local`` and its gradient are meta tensors: computing with them raises.

    Attributes:
        store: store of values and gradient.
        index: index of this shard in ``store``.
    """

    store: ParameterStore
    index: int
    is_on_disk = True

    def values(self) -> Tensor:
        """Read the values; see ``Shard``."""
        return self.store.read(self.index).view(self.local.shape)

    def assign(self, values: Tensor) -> None:
        """Write the values; see ``Shard``."""
        self.store.write({self.index: values.to("cpu", self.local.dtype).reshape(-1)})

    def take_over(self, rows: Tensor) -> None:
        """Write the rows; see ``Shard``."""
        self.assign(rows)

    def missing_gradient(self) -> str | None:
        """Explain a missing gradient; see ``Shard``."""
        return ON_DISK if self.index in self.store.gradients else None

    def take_grad(self) -> None:
        """Take the gradient; see ``Shard``. It is a meta tensor: the optimizer sees only that there is one."""
        self.local.grad = torch.empty_like(self.local) if self.index in self.store.gradients else None

    def grad(self) -> Tensor:
        """Read the gradient, and the parameters where layer-wise adaptation has added them to it; see ``Shard``."""
        gradients = self.store.gradients
        values = self.store.read(self.index) if gradients.needs_values(self.index) else None
        return gradients.read(self.index, values).view(self.local.shape)

    def known_square(self) -> Tensor | None:
        """Return the squared norm, computed when the gradient came in; see ``Shard``."""
        return self.store.gradients.square(self.index)

    def change_grad(self, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """Note a change, carried out whenever elements are read; see ``Shard``."""
        self.store.gradients.change(self.index, factor, param_factor)

    def forget_grad(self) -> None:
        """Forget the gradient; see ``Shard``."""
        super().forget_grad()
        self.discard_grad()

    def discard_grad(self) -> None:
        """Discard the gradient on the disk; see ``Store``."""
        self.store.gradients.forget(self.index)

    def set_zero_grad(self) -> None:
        """Set a zero gradient; see ``Shard``."""
        self.store.gradients.set_zero(self.index)
        self.local.grad = torch.empty_like(self.local)

    def normalize_rows(self) -> None:
        """Set rows to unit length; see ``Shard``."""
        values = self.values()
        divide_by_norms(values)
        self.assign(values)


def disk_shard(shard: Shard, store: ParameterStore | None) -> Shard:
    """Return ``shard`` as a ``DiskShard`` if it is in ``store``, else unchanged."""
    index = None if store is None else store.layout.index_of.get(shard.name)
    if store is None or index is None:
        return shard
    num_elements = store.layout.params[index].num_elements
    assert shard.local.numel() == num_elements, (shard.name, shard.local.shape, num_elements)
    return DiskShard(**{field.name: getattr(shard, field.name) for field in fields(shard)}, store=store, index=index)


@dataclass(eq=False, kw_only=True)
class HostShard(Shard):
    """A shard with a master copy in host memory, ``local``, which the optimizer updates; see ``Shard``.

    During the backward pass, gradients are copied to the host as soon as their unit is reduced, and freed on the
    device. ``publish`` copies updated values back. Copies from and to pinned memory overlap with the device's work, and
    those of values also with the update (``OverlappedUpdate``).

    Attributes:
        on_device: the rows that the model computes with.
        pin: page-lock the host's memory.
    """

    on_device: Tensor
    pin: bool

    def __post_init__(self) -> None:
        self._host_grad: Tensor | None = None
        self._is_there = False
        self._arrival: Any = None
        # fully_shard calls these hooks itself when it has reduced a gradient, on the stream that reduced it.
        if isinstance(self.source, DTensor) and self.source.requires_grad:
            self.source.register_post_accumulate_grad_hook(lambda _: self._fetch_grad())

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Assign the values; see ``Shard``."""
        self.local.copy_(values)
        self.publish()

    @torch.no_grad()
    def take_over(self, rows: Tensor) -> None:
        """Copy the rows to the host; see ``Shard``."""
        self.local.copy_(rows)

    def held(self) -> Tensor:
        """Return the rows on the device; see ``Shard``."""
        return self.on_device

    def take_grad(self) -> None:
        """Take the gradient, after waiting for it to arrive; see ``Shard``."""
        self._fetch_grad()  # a scalar's: only sharded parameters have the hook
        self._wait()
        self.local.grad = self._host_grad if self._is_there else None

    def forget_grad(self) -> None:
        """Forget the gradient; see ``Shard``."""
        super().forget_grad()
        self.discard_grad()

    def missing_gradient(self) -> str | None:
        """Explain a missing gradient; see ``Shard``."""
        return ON_HOST if self._is_there else None

    def discard_grad(self) -> None:
        """Discard the gradient on the host; see ``Store``."""
        self._is_there = False

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the rows to the device; see ``Shard``."""
        # Not waited for: the device runs the next forward pass after this copy, whatever the stream (CopyStream).
        self.on_device.copy_(self.local, non_blocking=True)

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Set rows to unit length; see ``Shard``."""
        super().normalize_rows()
        self.publish()

    @torch.no_grad()
    def _fetch_grad(self) -> None:
        """Add the gradient on the device to the one here, and free it there."""
        grad = self.local_grad()
        if grad is None:
            return
        # The last copy into the same memory may still be in flight.
        self._wait()
        if self._host_grad is None:
            self._host_grad = _host_like(self.local, self.pin)
        if self._is_there:
            # The host adds, so it must wait for the copy.
            self._host_grad.add_(grad.to("cpu"))
        else:
            self._host_grad.copy_(grad, non_blocking=True)
            if grad.is_cuda:
                self._arrival = torch.cuda.Event()
                self._arrival.record()
        self._is_there = True
        set_real_grad(self.source, None)  # the parameter's own setter would discard the copy

    def _wait(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None


def needs_host_shards(plan: ShardingPlan, device: torch.device) -> bool:
    """Check whether the optimizer runs on the host and the parameters stay on a GPU."""
    return plan.offload_optimizer.device != "none" and plan.offload_params.device == "none" and device.type != "cpu"


@torch.no_grad()
def host_shard(shard: Shard, pin: bool) -> HostShard:
    """Return ``shard``, which is on a GPU, as a ``HostShard`` with a master copy on the host."""
    on_device = shard.local.detach()
    values = {field.name: getattr(shard, field.name) for field in fields(Shard)}
    values["local"] = nn.Parameter(_host_like(on_device, pin).copy_(on_device), requires_grad=shard.local.requires_grad)
    return HostShard(**values, on_device=on_device, pin=pin)


def _host_like(tensor: Tensor, pin: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
