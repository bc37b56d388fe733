"""A shard on disk. The model and the optimizer hold only its shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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
