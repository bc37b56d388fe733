"""Shards whose numbers are not on the device: on disk, or a master copy, gradient and state on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.shard import Shard, divide_by_norms


@dataclass(eq=False)
class DiskShard(Shard):
    """See ``Shard``. ``local`` and its gradient are on the meta device: computing with them raises an error.

    Attributes:
        store: where values and gradient are.
        index: of this shard there.
    """

    store: ParameterStore = None  # type: ignore[assignment]
    index: int = -1
    is_on_disk = True

    def values(self) -> Tensor:
        """See ``Shard``. Reads them."""
        return self.store.read(self.index).view(self.local.shape)

    def assign(self, values: Tensor) -> None:
        """See ``Shard``. Writes them."""
        self.store.write({self.index: values.to("cpu", self.local.dtype).reshape(-1)})

    def take_grad(self) -> None:
        """See ``Shard``: what the optimizer sees is that there is one."""
        self.local.grad = torch.empty_like(self.local) if self.index in self.store.gradients else None

    def grad(self) -> Tensor:
        """See ``Shard``. Reads it, and the parameters where layer-wise adaptation has added them to it."""
        gradients = self.store.gradients
        values = self.store.read(self.index) if gradients.needs_values(self.index) else None
        return gradients.read(self.index, values).view(self.local.shape)

    def change_grad(self, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """See ``Shard``. Carried out whenever elements of it are read."""
        self.store.gradients.change(self.index, factor, param_factor)

    def forget_grad(self) -> None:
        """See ``Shard``."""
        super().forget_grad()
        self.store.gradients.forget(self.index)

    def set_zero_grad(self) -> None:
        """See ``Shard``."""
        self.store.gradients.set_zero(self.index)
        self.local.grad = torch.empty_like(self.local)

    def whole(self) -> Tensor:
        """See ``Shard``."""
        with self._in_memory():
            return super().whole()

    def normalize_rows(self) -> None:
        """See ``Shard``."""
        values = self.values()
        divide_by_norms(values)
        self.assign(values)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        assert isinstance(self.source, DTensor)
        absent = self.source._local_tensor
        # full_tensor() gathers what the DTensor holds, and that is a meta tensor but for this moment.
        self.source._local_tensor = self.values()
        try:
            yield
        finally:
            self.source._local_tensor = absent


def disk_shard(shard: Shard, store: ParameterStore | None) -> Shard:
    """``shard`` as a ``DiskShard`` if ``store`` holds it, else unchanged."""
    index = None if store is None else store.layout.index_of.get(shard.name)
    if store is None or index is None:
        return shard
    num_elements = store.layout.params[index].num_elements
    assert shard.local.numel() == num_elements, (shard.name, shard.local.shape, num_elements)
    return DiskShard(**{field.name: getattr(shard, field.name) for field in fields(shard)}, store=store, index=index)


@dataclass(eq=False)
class HostShard(Shard):
    """See ``Shard``. ``local`` is the master copy in host memory, and what the optimizer updates.

    Gradients flow there while backward runs, as soon as a unit's have been reduced, and leave the device; what the
    optimizer has changed flows back with ``publish``. Copies from and to pinned memory overlap with the device's work.

    Attributes:
        on_device: the rows that the model computes with.
        pin: page-lock the host's memory.
    """

    on_device: Tensor = None  # type: ignore[assignment]
    pin: bool = False

    def __post_init__(self) -> None:
        self._host_grad: Tensor | None = None
        self._is_there = False
        self._arrival: Any = None
        # fully_shard calls these hooks itself when it has reduced a gradient, on the stream that reduced it.
        if isinstance(self.source, DTensor) and self.source.requires_grad:
            self.source.register_post_accumulate_grad_hook(lambda _: self._fetch_grad())

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """See ``Shard``."""
        self.local.copy_(values)
        self.publish()

    def held(self) -> Tensor:
        """See ``Shard``: the rows on the device."""
        return self.on_device

    def take_grad(self) -> None:
        """See ``Shard``. Waits for the gradient to arrive."""
        self._fetch_grad()  # of a scalar, which no hook has fetched
        self._wait()
        self.local.grad = self._host_grad if self._is_there else None

    def forget_grad(self) -> None:
        """See ``Shard``."""
        super().forget_grad()
        self._is_there = False

    @torch.no_grad()
    def publish(self) -> None:
        """See ``Shard``."""
        # Not waited for: the next forward pass is queued on the device behind this copy.
        self.on_device.copy_(self.local, non_blocking=True)

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """See ``Shard``."""
        super().normalize_rows()
        self.publish()

    @torch.no_grad()
    def _fetch_grad(self) -> None:
        """Add the gradient on the device to the one here, and free it there."""
        grad = self.local_grad()
        if grad is None:
            return
        # The last copy into the same memory may be under way still.
        self._wait()
        if self._host_grad is None:
            self._host_grad = _host_like(self.local, self.pin)
        if self._is_there:
            # The sum needs all of the copy, so this one is waited for.
            self._host_grad.add_(grad.to("cpu"))
        else:
            self._host_grad.copy_(grad, non_blocking=True)
            if grad.is_cuda:
                self._arrival = torch.cuda.Event()
                self._arrival.record()
        self._is_there = True
        self.source.grad = None

    def _wait(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None


def needs_host_shards(plan: ShardingPlan, device: torch.device) -> bool:
    """Whether the optimizer runs on another device than the parameters are on."""
    return plan.offload_optimizer.device != "none" and plan.offload_params.device == "none" and device.type != "cpu"


@torch.no_grad()
def host_shard(shard: Shard, pin: bool) -> HostShard:
    """``shard``, which is on a device, with its master copy on the host."""
    on_device = shard.local.detach()
    given = {field.name: getattr(shard, field.name) for field in fields(Shard)}
    given["local"] = nn.Parameter(_host_like(on_device, pin).copy_(on_device), requires_grad=shard.local.requires_grad)
    return HostShard(**given, on_device=on_device, pin=pin)


def _host_like(tensor: Tensor, pin: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
