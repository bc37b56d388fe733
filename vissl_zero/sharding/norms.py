"""Norms of full parameters and gradients from the shards this rank holds, in one collective for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared L2 norm of each local shard.

    Args:
        tensors: T shards of any shapes, one device; an empty shard counts as zero.
    Returns:
        Shape (T,), float32 (float64 for float64 input). Not a collective: see ``sum_over_ranks``.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    dtype = _wide(tensors)
    # In the wide type: squares of large values overflow in half precision.
    norms = torch._foreach_norm(filled, 2, dtype=dtype) if filled else ()
    return _in_place_of_empty(tensors, [norm.square() for norm in norms], dtype)


def dots(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Inner product of each pair of local shards; shapes and dtype as ``squared_norms``.

    One kernel a pair: a foreach product would hold a copy of all gradients.
    """
    dtype = _wide(lefts)
    pairs = zip(lefts, rights, strict=True)
    products = [
        torch.dot(left.detach().flatten(), right.detach().flatten()).to(dtype) for left, right in pairs if left.numel()
    ]
    return _in_place_of_empty(lefts, products, dtype)


def sum_over_ranks(partials: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``partials`` summed over the ranks that hold shards of the same tensors, in place.

    Args:
        partials: the same shape on every member.
        group: the shard group; None: nothing is sharded, and ``partials`` are the result.
    Cost: one all-reduce, or none.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(partials, group=group)
    return partials


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    """Reductions run in float32 at least."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _in_place_of_empty(tensors: Sequence[Tensor], values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One 0-d value per non-empty tensor, in order, and zero for the empty ones; shape (T,)."""
    device = tensors[0].device if tensors else None
    zero = torch.zeros((), dtype=dtype, device=device)
    remaining = iter(values)
    found = [next(remaining) if tensor.numel() else zero for tensor in tensors]
    return torch.stack(found) if found else zero.new_zeros(0)
