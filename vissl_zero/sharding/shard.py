"""One rank's part of one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.sharding.torch_private import real_grad

# As torch.nn.functional.normalize has it, so that a row of zeros is not divided by zero.
MIN_ROW_NORM = 1e-12


@dataclass(eq=False)
class Shard:
    """This rank's rows of one parameter: what the optimizer updates.

    ``local`` is a plain tensor that shares memory with what the model holds, so that any element-wise optimizer runs on
    it at full speed, and knows nothing of sharding. Engines that cut parameters in another way have subclasses.

    Attributes:
        name: full name, without any wrapper's prefix.
        source: the parameter as the model holds it: a DTensor, or ``local`` itself where nothing is sharded.
        local: this rank's rows; possibly none.
        full_shape: of the full parameter.
        first_element: place of the first of their elements in the full parameter, flattened.
        contributes_to_norm: whether this rank's part enters sums over ranks. Scalars are replicated; one rank
            contributes to sums.
        num_copies, copy: how many ranks hold these very elements, and this rank's place among them.
        is_on_disk: values and gradient are on disk; ``local`` and its gradient are meta tensors.
    """

    is_on_disk: ClassVar[bool] = False

    name: str
    source: nn.Parameter
    local: nn.Parameter
    full_shape: torch.Size
    first_element: int = 0
    contributes_to_norm: bool = True
    num_copies: int = 1
    copy: int = 0

    def local_grad(self) -> Tensor | None:
        """The gradient of these rows that the last backward left, or None."""
        grad = real_grad(self.source)
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def take_grad(self) -> None:
        """Hand the gradient to the optimizer's view of the parameter. No copy."""
        if self.local is not self.source:
            self.local.grad = self.local_grad()

    def values(self) -> Tensor:
        """These rows, to read."""
        return self.local.detach()

    def held(self) -> Tensor:
        """This rank's elements of the parameter on the device, read-only: its rows, or all if it is replicated."""
        return self.values()

    def held_shape(self) -> torch.Size:
        """Shape of ``held``, without reading it."""
        return self.local.shape

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Overwrite these rows."""
        self.local.copy_(values)

    def publish(self) -> None:
        """Copy what the optimizer has changed to the model, where ``local`` is a copy. Does not wait for the device."""

    def grad(self) -> Tensor:
        """The gradient that ``take_grad`` found, to read."""
        assert self.local.grad is not None
        return self.local.grad

    def set_zero_grad(self) -> None:
        """Have a gradient of zero, where backward has left none."""
        self.local.grad = torch.zeros_like(self.local)

    def change_grad(self, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """The gradient becomes ``factor * grad + param_factor * param``."""
        self.grad().mul_(factor)
        if param_factor is not None:
            self.grad().addcmul_(self.local.detach(), param_factor)

    def forget_grad(self) -> None:
        """Release the gradient."""
        # Both refer to one tensor, whose memory is freed only when neither does.
        self.source.grad = None
        self.local.grad = None

    def whole(self) -> Tensor:
        """The full parameter, on every rank. Collective; costs one all-gather of it."""
        with torch.no_grad():
            return self.source.full_tensor() if isinstance(self.source, DTensor) else self.source.detach()

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Divide each row (dim 0) of the full parameter by its L2 norm, in place; shards are whole rows."""
        divide_by_norms(self.local)


def shards_of(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[Shard]:
    """This rank's shard of every parameter, tied ones once, in the order of ``named_parameters``.

    Args:
        model: already sharded.
        group: the ranks that share it; None where every rank holds it whole and nothing is summed over ranks.
    """
    is_first = group is None or group.rank() == 0
    for name, source in model.named_parameters():
        if not isinstance(source, DTensor):
            yield whole_shard(name, source, contributes_to_norm=is_first)
            continue
        with torch.no_grad():
            local = nn.Parameter(source.to_local(), requires_grad=source.requires_grad)
        mesh = source.device_mesh
        # With shard groups, the first mesh dimension counts the groups, which hold the same rows.
        num_copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim > 1 else (1, 0)
        first_element = _first_row(source) * source.shape[1:].numel()
        yield Shard(name, source, local, source.shape, first_element, num_copies=num_copies, copy=copy)


def whole_shard(name: str, param: nn.Parameter, contributes_to_norm: bool = True) -> Shard:
    """The shard of a parameter that every rank of the world holds whole."""
    copies = collectives.world_size(), collectives.rank()
    return Shard(
        name, param, param, param.shape, contributes_to_norm=contributes_to_norm, num_copies=copies[0], copy=copies[1]
    )


def empty_state(local: Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Memory for optimizer state of ``local``, in the order in which it lies: fused kernels pair both up."""
    # A meta tensor stands for a shard on disk, whose state is in host memory or passes through it.
    device = torch.device("cpu") if local.is_meta else local.device
    if tuple(shape) != tuple(local.shape):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_like(local, dtype=dtype, device=device)


def divide_by_norms(rows: Tensor) -> None:
    """Divide each row of a matrix by its L2 norm, in place; a row of zeros stays as it is."""
    rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_ROW_NORM))


def _first_row(tensor: DTensor) -> int:
    """Rows are dealt in chunks of equal size, the last ones smaller or empty, as ``torch.chunk`` does."""
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    shard_index, num_shards = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return min(shard_index * -(-num_rows // num_shards), num_rows)
