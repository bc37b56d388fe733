"""Histograms of full weights and gradients, counted from the shards that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero.sharding.state.shard import Shard

_PER_DECADE, _LEAST, _MOST = 5, -10, 4  # powers of ten
_SIDE = [10 ** (place / _PER_DECADE) for place in range(_LEAST * _PER_DECADE, _MOST * _PER_DECADE + 1)]
# Fixed, not computed from the values, so that counts of ranks, and of steps, can be added and compared.
EDGES = [*(-edge for edge in reversed(_SIDE)), *_SIDE]


@dataclass(frozen=True)
class Histograms:
    """Counts of the elements of each trained parameter, before the update of a step; equal on every rank.

    Attributes:
        names: full names, of T parameters that are not frozen.
        weights, gradients: counts (T, B), int64, on the CPU. Bucket b is from EDGES[b - 1] up to EDGES[b]; the first
            and the last are open. Gradients are unscaled and not clipped; a row of zeros: no rank had a gradient.
    """

    names: Sequence[str]
    weights: Tensor
    gradients: Tensor


@torch.no_grad()
def histograms_of(shards: Sequence[Shard], group: dist.ProcessGroup | None) -> Histograms:
    """Count the elements of parameters and of their gradients.

    Args:
        shards: the same names in the same order on every rank; gradients are averaged.
        group: the ranks that share the parameters; None: every rank holds them whole.
    Cost: one all-reduce of 2 T B numbers; a copy of one shard in float64 at a time. Waits for the device.
    """
    rows = []
    for shard in shards:
        counts = shard.contributes_to_norm
        rows.append(_counts(shard.values() if counts else None))
        rows.append(_counts(shard.grad() if counts and shard.local.grad is not None else None))
    table = torch.stack(rows)
    if group is not None:
        # Counts are on the CPU, and nccl reduces CUDA tensors only.
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        table = table.to(device)
        dist.all_reduce(table, group=group)
        table = table.cpu()
    return Histograms([shard.name for shard in shards], table[0::2], table[1::2])


def _counts(values: Tensor | None) -> Tensor:
    """Count the elements in each bucket; (B,) on the CPU."""
    if values is None:
        return torch.zeros(len(EDGES) + 1, dtype=torch.int64)
    edges = torch.tensor(EDGES, dtype=torch.float64, device=values.device)
    places = torch.bucketize(values.detach().flatten().double(), edges, right=True)
    return torch.bincount(places, minlength=len(EDGES) + 1).cpu()
