"""One rank's part of one parameter: a shard, or rows of a parameter that every rank holds whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.sharding.state.checksum import checksum
from vissl_zero.sharding.state.missing_gradient import ELSEWHERE, OF_THIS_RANK, GradientGuard, WatchedParameter, watch
from vissl_zero.sharding.state.sharded_tensor import ShardedTensor, first_row, sharded
from vissl_zero.sharding.torch_private import foreach_norm, local_tensor, real_grad, set_real_grad

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
        full_shape: shape of the full parameter.
        first_element: position of the first local element in the flattened full parameter.
        contributes_to_norm: whether sums over ranks count this rank's part; of a replicated parameter, on one rank.
        num_copies, copy: number of ranks that hold the same elements, and this rank's position among them.
        is_on_disk: values and gradient are on disk; ``local`` and its gradient are meta tensors.
        noted: changes of the gradient that the update applies after it has widened the gradient; None: it widens none.
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
    noted: list[tuple[Tensor | float, Tensor | None]] | None = None

    @property
    def notes_changes(self) -> bool:
        """Return whether ``change_grad`` notes a change for the update instead of making it."""
        return self.is_on_disk or self.noted is not None

    def local_grad(self) -> Tensor | None:
        """Return the gradient of these rows; None if the backward passes left none."""
        grad = real_grad(self.source)
        return None if grad is None else local_tensor(grad)

    def take_grad(self) -> None:
        """Set ``local.grad``, which the optimizer reads, to the gradient of these rows. No copy."""
        if self.local is not self.source:
            self.local.grad = self.local_grad()

    def values(self) -> Tensor:
        """Return these rows, to read."""
        return self.local.detach()

    def held(self) -> Tensor:
        """Return this rank's elements on the device, read-only: its rows, or the whole of a replicated parameter."""
        return self.values()

    def held_shape(self) -> torch.Size:
        """Return the shape of ``held``, without reading it."""
        return self.local.shape

    def sum_of_writes(self) -> Tensor:
        """Return a checksum (2,) of what the loop has written into the parameter; it must be equal on all ranks."""
        if self.is_held_whole:
            return checksum(self.held())
        taken = self.source.taken if isinstance(self.source, ShardedTensor) else None
        return torch.zeros(2, dtype=torch.float64) if taken is None else taken

    def forget_writes(self) -> None:
        """Forget the loop's writes, after an update."""
        if isinstance(self.source, ShardedTensor):
            self.source.taken = None

    @property
    def is_held_whole(self) -> bool:
        """Return whether every rank of the world holds the full parameter: ``held`` is the same on all."""
        return self.num_copies == collectives.world_size()

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Overwrite these rows."""
        self.local.copy_(values)

    def take_over(self, rows: Tensor) -> None:
        """Store ``rows`` that the loop has written into ``source``, if the values are kept elsewhere too."""

    def missing_gradient(self) -> str | None:
        """Explain why the loop cannot read an existing gradient; None if it can, or there is none."""
        return None

    @property
    def is_spent(self) -> bool:
        """Return whether an update has consumed the gradient, and the loop has not called ``zero_grad`` since."""
        return isinstance(self.source, GradientGuard | ShardedTensor) and self.source.is_spent

    def mark_spent(self) -> None:
        """Mark the gradient as released after an update: a loop that uses it gets an error."""
        if isinstance(self.source, GradientGuard | ShardedTensor):
            self.source.is_spent = True

    def publish(self) -> None:
        """Copy the updated values to the model if ``local`` is a copy. Does not wait for the device."""

    def grad(self) -> Tensor:
        """Return the gradient that ``take_grad`` has set, to read."""
        assert self.local.grad is not None
        return self.local.grad

    def known_square(self) -> Tensor | None:
        """Return the squared norm of ``grad``, 0-d, as ``squared_norms`` computes it; None if ``grad`` must be read."""
        return None

    def set_zero_grad(self) -> None:
        """Set a gradient of zeros, where another rank has one and this rank has none."""
        self.local.grad = torch.zeros_like(self.local)

    def change_grad(self, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """Set the gradient to ``factor * grad + param_factor * param``."""
        if self.noted is not None:
            self.noted.append((factor, param_factor))
            return
        self.grad().mul_(factor)
        if param_factor is not None:
            self.grad().addcmul_(self.local.detach(), param_factor)

    def forget_grad(self) -> None:
        """Release the gradient."""
        # Both refer to one tensor; its memory is freed with the last reference.
        self.source.grad = None
        self.local.grad = None

    def full_tensor(self) -> Tensor:
        """Gather the full parameter on every rank. Collective; costs one all-gather of it."""
        with torch.no_grad():
            return self.source.full_tensor() if isinstance(self.source, DTensor) else self.source.detach()

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Divide each row (dim 0) of the full parameter by its L2 norm, in place. A shard has whole rows."""
        divide_by_norms(self.local)


def shards_of(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[Shard]:
    """Yield this rank's shard of every parameter, tied ones once, in the order of ``named_parameters``.

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
        sharded(source)
        mesh = source.device_mesh
        # With shard groups, the first mesh dimension counts the groups, which hold the same rows.
        num_copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim > 1 else (1, 0)
        first_element = first_row(source) * source.shape[1:].numel()
        yield Shard(name, source, local, source.shape, first_element, num_copies=num_copies, copy=copy)


def whole_shard(name: str, param: nn.Parameter, contributes_to_norm: bool = True) -> Shard:
    """Make the shard of a parameter that every rank of the world holds whole."""
    copies = collectives.world_size(), collectives.rank()
    return Shard(
        name, param, param, param.shape, contributes_to_norm=contributes_to_norm, num_copies=copies[0], copy=copies[1]
    )


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the squared L2 norm of each local shard.

    Args:
        tensors: T shards of any shapes, one device; an empty shard counts as zero.
    Returns:
        Shape (T,), float32 (float64 for float64 input). Not a collective: see ``sum_over_group``.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    dtype = wide_dtype(tensors)
    # In the wide type: squares of large values overflow in half precision.
    norms = foreach_norm(filled, 2, dtype=dtype) if filled else ()
    return with_zeros_for_empty(tensors, norms, dtype).square()  # one kernel for all


def wide_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype for reductions: float64 if any tensor has it, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def with_zeros_for_empty(tensors: Sequence[Tensor], values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack one number per tensor, (len(tensors),): zero for an empty tensor, else the next of the 0-d ``values``."""
    device = tensors[0].device if tensors else None
    zero = torch.zeros((), dtype=dtype, device=device)
    remaining = iter(values)
    filled = [next(remaining) if tensor.numel() else zero for tensor in tensors]
    return torch.stack(filled) if filled else zero.new_zeros(0)


def empty_state(local: Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Allocate optimizer state of ``local`` in its memory format: fused kernels walk over both by address."""
    # A meta tensor stands for a shard on disk, whose state is in host memory or passes through it.
    device = torch.device("cpu") if local.is_meta else local.device
    if tuple(shape) != tuple(local.shape):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_like(local, dtype=dtype, device=device)


def divide_by_norms(rows: Tensor) -> None:
    """Divide each row of a matrix by its L2 norm, in place; a row of zeros stays as it is."""
    rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_ROW_NORM))


class WholeParameter(WatchedParameter):
    """A parameter that every rank holds in full, while each rank updates some of its rows.

    Its gradient leaves ``.grad`` for messages. A plain parameter would show None, and a loop that edits gradients would
    silently skip it.
    """

    _row_shard: RowShard | None = None  # None: gradients are kept whole
    _settle: Callable[[], None] = staticmethod(lambda: None)

    def _missing(self) -> str | None:
        if self._row_shard is None:
            return None
        # The communication must end first: only then is it known whether any rank had a gradient.
        self._settle()
        return None if self._row_shard.reduced is None else ELSEWHERE

    def _only_from_backward(self) -> str | None:
        return None if self._row_shard is None else ELSEWHERE

    def _drop_grad(self) -> None:
        if self._row_shard is None:
            set_real_grad(self, None)
        else:
            self._row_shard.drop_grad()


class ReplicatedParameter(WatchedParameter):
    """A parameter that stays full on every rank while others are sharded.

    Until ``step()`` averages its gradient, ranks have different ones: a loop that reads it would differ between ranks.
    """

    def _missing(self) -> str | None:
        return None if real_grad(self) is None else OF_THIS_RANK


def hide_gradient(shard: Shard) -> Shard:
    """Hide the shard's gradient, which is not averaged yet, from the loop."""
    # A second parameter over the same memory: the optimizer needs ``.grad``, which the class below hides.
    local = nn.Parameter(shard.source.detach(), shard.source.requires_grad)
    watch(shard.source, ReplicatedParameter)
    return dataclasses.replace(shard, local=local)


@dataclass(eq=False, kw_only=True)
class RowShard(Shard):
    """Rows that this rank updates, of a parameter that every rank holds in full.

    Cut as ``fully_shard`` cuts: in chunks of equal numbers of rows, the last ones shorter or empty. A scalar is a row.

    Attributes:
        source: the full parameter.
        local: a view of this rank's rows in it.
        reduced: averaged gradient of these rows; None until a message has brought it.
        rows_per_rank: rows of each rank but the last ones, which may have fewer or none.
    """

    reduced: Tensor | None = None
    rows_per_rank: int

    @property
    def row_numel(self) -> int:
        """Elements in a row."""
        return self.full_shape[1:].numel()

    @property
    def padded_numel(self) -> int:
        """Elements of the largest part of any rank."""
        return self.rows_per_rank * self.row_numel

    def span(self, rank: int) -> tuple[int, int]:
        """Return begin and end of a rank's part in the flattened full parameter."""
        numel = self.full_shape.numel()
        return min(rank * self.padded_numel, numel), min((rank + 1) * self.padded_numel, numel)

    def local_grad(self) -> Tensor | None:
        """Return this rank's gradient; see ``Shard``."""
        if self.reduced is not None or self.source._row_shard is not None:  # type: ignore[attr-defined]
            return self.reduced
        # keep_gradients: ``.grad`` is the full mean, of which these rows are a part.
        grad, numel = self.source.grad, self.local.numel()
        if grad is None:
            return None
        return grad.contiguous().view(-1)[self.first_element : self.first_element + numel].view(self.local.shape)

    def held(self) -> Tensor:
        """Return the full parameter; see ``Shard``."""
        return self.source.detach()

    def held_shape(self) -> torch.Size:
        """Return the full shape; see ``Shard``."""
        return self.source.shape

    @property
    def is_held_whole(self) -> bool:
        """Return True; see ``Shard``."""
        return True

    def forget_grad(self) -> None:
        """Forget the gradient; see ``Shard``."""
        # Not ``source.grad = None``, whose setter ends here.
        set_real_grad(self.source, None)
        self.local.grad = None
        self.reduced = None
        self.source.is_spent, self.source.stand_in = False, None  # type: ignore[attr-defined]

    def drop_grad(self) -> None:
        """Forget the gradient in the middle of a step; a further backward pass starts from zero."""
        if self.reduced is not None:
            # Zeroed, not only dropped: further rounds of messages add to this memory until the next step.
            self.reduced.zero_()
        self.forget_grad()

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Set rows to unit length; see ``Shard``. Every rank does it to its whole copy, with the same result."""
        divide_by_norms(self.source)


def row_shards(module: nn.Module, trained: set[str], num_ranks: int, rank: int) -> Iterator[Shard]:
    """Yield a shard of every parameter, tied ones once, in the order of ``named_parameters``.

    Args:
        module: whole, where it is to be trained.
        trained: full names of the parameters that the optimizer updates; others, and frozen ones, are not cut.
        num_ranks: number of ranks that share the state.
        rank: this one.
    """
    for name, source in module.named_parameters():
        if name not in trained or not source.requires_grad:
            yield whole_shard(name, source, contributes_to_norm=rank == 0)
            continue
        rows_per_rank = -(-(source.shape[0] if source.dim() else 1) // num_ranks)
        shard = RowShard(name, source, source, source.shape, rows_per_rank=rows_per_rank)
        start, stop = shard.span(rank)
        watch(source, WholeParameter)
        flat = source.detach().view(-1)[start:stop]
        # torch cannot infer the number of rows where a row has no elements.
        shard.local = nn.Parameter(flat.view(-1, *source.shape[1:]) if shard.row_numel else flat)
        shard.first_element = start
        yield shard


@dataclass(frozen=True)
class WholeTensor:
    """A parameter or buffer that can be gathered in full, one at a time.

    Attributes:
        name: full name.
        dtype, shape: of the full tensor.
        read: gathers the tensor, for rank 0. Collective: every rank reads the same tensors in the same order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
