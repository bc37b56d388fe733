"""Differentiable collectives that couple samples of different ranks in a loss: rows of all ranks, sums over ranks.

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

Sinkhorn's algorithm runs over the samples of all ranks (https://arxiv.org/abs/2006.09882, section 3.1). A queue of past
embeddings joins SwAV's assignment when batches are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.collectives import all_reduce_max, all_reduce_sum


@dataclass(frozen=True)
class SampleCounts:
    """The number of samples of a batch that each rank holds.

    Attributes:
        per_rank: number of samples of each rank; zero is allowed.
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
    """Count the samples of every rank. Collective.

    Cost: one all-gather of one number, read on the host, which waits for the device. Nothing with one rank.
    """
    if collectives.world_size() == 1:
        return SampleCounts((num_local,))
    return SampleCounts(tuple(collectives.all_gather_number(num_local, device)))


def gather_samples(rows: Tensor, counts: SampleCounts | None = None) -> Tensor:
    """Gather the rows of all ranks in the order of samples; differentiable. Collective, in the backward pass too.

    Args:
        rows: (n_r, ...) of this rank; trailing dimensions and dtype equal on all ranks.
        counts: counts of the batch; None asks the ranks for them (see ``count_samples``).
    Returns:
        (N, ...), identical on every rank.
    Cost: one all-gather of ``max n_r`` rows per rank; backward, one all-reduce of N rows.
    """
    counts = counts or count_samples(len(rows), rows.device)
    gathered: Tensor = _GatherSamples.apply(rows, counts)
    return gathered


def sum_over_ranks(statistic: Tensor) -> Tensor:
    """Sum a tensor over all ranks; differentiable. Collective, in the backward pass too.

    Args:
        statistic: any shape, the same on all ranks; a sum over this rank's samples.
    Cost: one all-reduce, and one more in the backward pass.
    """
    total: Tensor = _SumOverRanks.apply(statistic)
    return total


def weighted_mean(values: Tensor, weights: Tensor, num_local: int) -> Tensor:
    """Compute this rank's part of a weighted mean over all ranks, which may hold different total weights. Collective.

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
    """Widen the tensor to float32 if it has a narrower format; float64 stays. Losses are computed in it."""
    return tensors.to(torch.promote_types(tensors.dtype, torch.float32))


class _GatherSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: SampleCounts) -> Tensor:
        ctx.counts = counts
        return collectives.all_gather_rows(rows, counts.per_rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        counts = ctx.counts
        return collectives.all_reduce_sum(gradients[0])[counts.first : counts.first + counts.local], None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, statistic: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return collectives.all_reduce_sum(statistic)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return collectives.all_reduce_sum(gradients[0])


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float, num_iters: int, counts: Tensor | None = None, powerlaw: float = 0.0
) -> Tensor:
    """Compute soft assignments that use all prototypes equally (or by a power law) over the samples of all ranks.

    Alternately scales prototypes to equal shares and samples to one, starting from ``exp(scores / epsilon)``, in the
    logarithm: small epsilons neither overflow nor leave a prototype with a sum of zero, so nothing depends on a
    condition that ranks might see differently. Every rank must call this with the same C, K and number of iterations.

    Args:
        scores: (C, n, K), C independent problems over n samples of this rank (any n, also 0) and K prototypes; float32
            or float64.
        epsilon: weight of the entropy; smaller is harder.
        num_iters: rounds; 0 gives the softmax of ``scores / epsilon``.
        counts: (C, n) bool, samples that count; the others are assigned like them, but use nothing. None: all count.
        powerlaw: prototype i, from 1, has a share proportional to i to the power of minus this; 0: equal shares.
    Returns:
        (C, n, K), each row sums to 1. The same for a sample however samples are spread over ranks, up to rounding.
    Cost: two all-reduces of C * K numbers per round.
    """
    logits = scores / epsilon
    shares = -powerlaw * torch.log(torch.arange(1, scores.shape[2] + 1, dtype=scores.dtype, device=scores.device))
    for _ in range(num_iters):
        # Shares up to one factor for all prototypes, which the next line takes out again.
        logits = logits - _logsumexp_over_samples(logits, counts) + shares
        logits = logits - torch.logsumexp(logits, dim=2, keepdim=True)
    return torch.softmax(logits, dim=2)


def _logsumexp_over_samples(logits: Tensor, counts: Tensor | None) -> Tensor:
    """Reduce (C, n, K) to (C, 1, K) over the samples of all ranks that count; a rank without any adds nothing."""
    if counts is not None:
        logits = logits.masked_fill(~counts[:, :, None], -torch.inf)
    local = torch.logsumexp(logits, dim=1, keepdim=True)
    # The largest of all ranks, so that the exponentials below overflow on none of them.
    largest = all_reduce_max(local)
    total = largest + torch.log(all_reduce_sum(torch.exp(local - largest)))
    # No sample counts on any rank: nothing to share out, and -inf - -inf above.
    return total if counts is None else torch.where(largest == -torch.inf, 0.0, total)


class EmbeddingQueue(nn.Module):
    """One queue for the whole run, identical on every rank, newest samples first.

    Rows are ordered by micro-batch and, within one, by sample, whatever the number of ranks.

    Args:
        num_queues: independent queues, one per crop that is assigned (C).
        length: samples kept, L.
        embedding_dim: D.

    Attributes:
        embeddings: buffer (C, L, D); only the first ``num_filled`` of each queue are samples.
        num_filled: samples so far, at most L; equal on every rank.
    """

    embeddings: Tensor

    def __init__(self, num_queues: int, length: int, embedding_dim: int):
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(num_queues, length, embedding_dim))
        # On the host: it decides shapes, and reading it from the device would wait for the device in every step.
        self.num_filled = 0

    @torch.no_grad()
    def push(self, embeddings: Tensor) -> None:
        """Put this micro-batch in front and drop the oldest. Collective; ranks hold consecutive parts of the batch.

        Args:
            embeddings: (C, n, D) of this rank's n samples; n may differ between ranks.
        Cost: two all-gathers (see ``all_gather_rows``); copies the queue once.
        """
        length = self.embeddings.shape[1]
        # A step that the loss scaler will skip may hold infinities; they must not stay for L samples.
        finite = torch.nan_to_num(embeddings.to(self.embeddings.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        newest = collectives.all_gather_rows(finite.transpose(0, 1)).transpose(0, 1)
        self.embeddings.copy_(torch.cat((newest, self.embeddings), dim=1)[:, :length])
        self.num_filled = min(length, self.num_filled + newest.shape[1])

    def local_part(self) -> Tensor:
        """Return this rank's share (C, q, D) of the queue; shares are consecutive and differ by one at most."""
        rank, world_size = collectives.rank(), collectives.world_size()
        return self.embeddings[:, rank * self.num_filled // world_size : (rank + 1) * self.num_filled // world_size]

    def get_extra_state(self) -> Tensor:
        """Return ``num_filled``, for ``state_dict``."""
        return torch.tensor(self.num_filled)

    def set_extra_state(self, state: Tensor) -> None:
        """Set ``num_filled``, from ``load_state_dict``."""
        self.num_filled = int(state)
