"""A shard whose parameters stay on the device while its master copy, gradient and optimizer state are on the host."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.shard import Shard


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
