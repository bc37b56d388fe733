"""What couples samples of different ranks in a loss: rows of all ranks, and sums over all ranks, both differentiable.

The training loop multiplies the loss of rank r by ``n_r * world_size / N`` (its samples over all samples) and gradients
are averaged over ranks. A loss follows one of two conventions, and is then exactly that of one process with the whole
batch, gradients included:

- *A mean over samples*: each rank returns the mean over its own samples, which may depend on rows of other ranks.
- *A function of statistics of the whole batch*: every rank returns the same value.

The backward pass of both functions here sums gradients over ranks, which is the exact transpose of the forward pass
and makes both conventions right. It is a collective: all ranks must run the backward pass of the same graph. A rank
without samples takes part with zero rows.

Ranks hold consecutive parts of a batch, so rows in the order of ranks are in the order of samples, whatever the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vissl_zero import collectives


@dataclass(frozen=True)
class SampleCounts:
    """How many samples of a batch each rank holds.

    Attributes:
        per_rank: by rank; zero is allowed.
    """

    per_rank: tuple[int, ...]

    @property
    def total(self) -> int:
        """Samples over all ranks, N."""
        return sum(self.per_rank)

    @property
    def local(self) -> int:
        """Samples of this rank, n."""
        return self.per_rank[collectives.rank()]

    @property
    def first(self) -> int:
        """Position of this rank's first sample in the whole batch."""
        return sum(self.per_rank[: collectives.rank()])


def count_samples(num_local: int, device: torch.device) -> SampleCounts:
    """The samples of every rank. Collective.

    Cost: one all-gather of one number, read on the host, which waits for the device. Nothing with one rank.
    """
    if collectives.world_size() == 1:
        return SampleCounts((num_local,))
    return SampleCounts(tuple(collectives.all_gather_number(num_local, device)))


def gather_samples(rows: Tensor, counts: SampleCounts | None = None) -> Tensor:
    """Rows of all ranks in the order of samples; differentiable. Collective, in the backward pass too.

    Args:
        rows: (n_r, ...) of this rank; trailing dimensions and dtype equal on all ranks.
        counts: of the batch; None asks the ranks for them (see ``count_samples``).
    Returns:
        (N, ...), identical on every rank.
    Cost: one all-gather of ``max n_r`` rows per rank; backward, one all-reduce of N rows.
    """
    counts = counts or count_samples(len(rows), rows.device)
    gathered: Tensor = _GatherSamples.apply(rows, counts)
    return gathered


def sum_over_ranks(statistic: Tensor) -> Tensor:
    """Sum of a tensor over all ranks; differentiable. Collective, in the backward pass too.

    Args:
        statistic: any shape, the same on all ranks; a sum over this rank's samples.
    Cost: one all-reduce, and one more in the backward pass.
    """
    total: Tensor = _SumOverRanks.apply(statistic)
    return total


def weighted_mean(values: Tensor, weights: Tensor, num_local: int) -> Tensor:
    """This rank's part of a weighted mean over all ranks, where ranks may hold different total weights. Collective.

    The loop's mean over ranks of what this returns is ``sum(weights * values) / sum(weights)`` over all ranks.

    Args:
        values: any shape.
        weights: shape of ``values``; without gradient.
        num_local: samples of this rank.
    Returns:
        0-d; zero where the total weight is zero.
    Cost: one all-reduce of two numbers.
    """
    totals = collectives.all_reduce_sum(torch.stack([weights.sum(), weights.new_tensor(num_local)]).to(values.dtype))
    share = totals[0] / totals[1].clamp(min=1)  # mean weight of a sample
    return (values * weights).sum() / share.clamp(min=torch.finfo(share.dtype).tiny) / max(num_local, 1)


def at_least_float32(tensors: Tensor) -> Tensor:
    """The tensor in float32 if it has a narrower format; float64 stays. Losses are computed in it."""
    return tensors.to(torch.promote_types(tensors.dtype, torch.float32))


class _GatherSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: SampleCounts) -> Tensor:
        ctx.counts = counts
        if collectives.world_size() == 1:
            return rows.clone()
        return torch.cat(_all_gather_padded(rows, counts.per_rank))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        counts = ctx.counts
        return collectives.all_reduce_sum(gradients[0])[counts.first : counts.first + counts.local], None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, statistic: Tensor) -> Tensor:
        return collectives.all_reduce_sum(statistic)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return collectives.all_reduce_sum(gradients[0])


def _all_gather_padded(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    # Every rank must send as many rows, in gloo and in NCCL.
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    everyone = collectives.all_gather_evenly(padded)
    return [part[:count] for part, count in zip(everyone, counts, strict=True)]
