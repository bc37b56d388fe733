"""Differentiable collectives that couple samples of different ranks in a loss: rows of all ranks, sums over ranks.

The training loop multiplies the loss of rank r by ``n_r * world_size / N`` (n_r samples of the N of all ranks), and
gradients are averaged over ranks. A loss that follows one of two conventions equals the loss of one process with the
whole batch, and so do its gradients:

- *A mean over samples*: each rank returns the mean over its own samples, which may depend on rows of other ranks.
- *A function of statistics of the whole batch*: every rank returns the same value.

The backward pass of both functions here sums gradients over ranks. This is the exact transpose of the forward pass, so
both conventions are exact. It is a collective: all ranks must run the backward pass of the same graph. A rank without
samples takes part with zero rows.

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
    """The number of samples of a batch on each rank.

    Attributes:
        per_rank: number of samples by rank; zero is allowed.
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
        counts: counts of the batch; None: gather them (see ``count_samples``).
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
    """Compute this rank's term of a weighted mean over all ranks, whose total weights may differ. Collective.

    The loop's mean of these terms over ranks is ``sum(weights * values) / sum(weights)`` over all ranks.

    Args:
        values: any shape.
        weights: shape of ``values``; without gradient.
        num_local: samples of this rank.
    Returns:
        0-d; zero where the total weight is zero.
    Cost: one all-reduce of two numbers.
    """
    totals = collectives.all_reduce_sum(torch.stack([weights.sum(), weights.new_tensor(num_local)]).to(values.dtype))
    # The loop weighs this rank by num_local over all samples. So the mean weight of a sample divides, not the sum.
    share = totals[0] / totals[1].clamp(min=1)
    # clamp: a total weight of zero, or a rank without samples, must give zero and not NaN.
    return (values * weights).sum() / share.clamp(min=torch.finfo(share.dtype).tiny) / max(num_local, 1)


def at_least_float32(tensors: Tensor) -> Tensor:
    """Convert the tensor to float32 if its format is narrower; float64 stays."""
    # All losses start with this: exponentials and norms of half precision have two or three digits only.
    return tensors.to(torch.promote_types(tensors.dtype, torch.float32))


class _GatherSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: SampleCounts) -> Tensor:
        ctx.counts = counts
        return collectives.all_gather_rows(rows, counts.per_rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        counts = ctx.counts
        # Every rank's loss depends on these rows, so their gradient is the sum over ranks: the transpose of a gather.
        return collectives.all_reduce_sum(gradients[0])[counts.first : counts.first + counts.local], None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, statistic: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return collectives.all_reduce_sum(statistic)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        # A sum over ranks is its own transpose: the losses of all ranks depend on this rank's terms.
        return collectives.all_reduce_sum(gradients[0])


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float, num_iters: int, counts: Tensor | None = None, powerlaw: float = 0.0
) -> Tensor:
    """Compute soft assignments that use all prototypes equally (or by a power law) over the samples of all ranks.

    Alternately scales prototypes to equal shares and samples to one, starting from ``exp(scores / epsilon)``. Every
    rank must call this with the same C, K and number of iterations.

    Args:
        scores: (C, n, K), C independent problems over n samples of this rank (any n, also 0) and K prototypes; float32
            or float64.
        epsilon: weight of the entropy; smaller is harder.
        num_iters: rounds; 0 gives the softmax of ``scores / epsilon``.
        counts: (C, n) bool, samples that the shares of prototypes count. The others are assigned, but not counted.
            None: all samples count.
        powerlaw: prototype i, from 1, has a share proportional to ``i ** -powerlaw``; 0: equal shares.
    Returns:
        (C, n, K), each row sums to 1. The rows do not depend on how samples are spread over ranks, except for rounding.
    Cost: two all-reduces of C * K numbers per round.
    """
    # In the logarithm, small epsilons neither overflow nor leave a prototype with a sum of zero. So there is no branch
    # for such prototypes, which some ranks might take and others not.
    logits = scores / epsilon
    shares = -powerlaw * torch.log(torch.arange(1, scores.shape[2] + 1, dtype=scores.dtype, device=scores.device))
    for _ in range(num_iters):
        # The shares need not sum to 1: the next line divides by any common factor.
        logits = logits - _logsumexp_over_samples(logits, counts) + shares
        logits = logits - torch.logsumexp(logits, dim=2, keepdim=True)
    return torch.softmax(logits, dim=2)


def _logsumexp_over_samples(logits: Tensor, counts: Tensor | None) -> Tensor:
    """Reduce (C, n, K) to (C, 1, K) over the samples of all ranks that count; a rank without any adds nothing."""
    if counts is not None:
        logits = logits.masked_fill(~counts[:, :, None], -torch.inf)
    local = torch.logsumexp(logits, dim=1, keepdim=True)
    # The maximum over all ranks, so that the exponentials below overflow on none of them.
    largest = all_reduce_max(local)
    total = largest + torch.log(all_reduce_sum(torch.exp(local - largest)))
    # If no sample counts on any rank, the line above is -inf - -inf.
    return total if counts is None else torch.where(largest == -torch.inf, 0.0, total)


class EmbeddingQueue(nn.Module):
    """A queue of past embeddings of all ranks, identical on every rank, newest samples first.

    Rows are in the order of micro-batches and, within a micro-batch, of samples, whatever the number of ranks.

    Args:
        num_queues: independent queues, one per crop that is assigned (C).
        length: samples kept, L.
        embedding_dim: D.

    Attributes:
        embeddings: buffer (C, L, D); only the first ``num_filled`` rows of each queue are samples.
        num_filled: number of samples so far, at most L; equal on every rank.
    """

    embeddings: Tensor

    def __init__(self, num_queues: int, length: int, embedding_dim: int):
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(num_queues, length, embedding_dim))
        # On the host: it decides shapes, and reading it from the device would wait for the device in every step.
        self.num_filled = 0

    @torch.no_grad()
    def push(self, embeddings: Tensor) -> None:
        """Add this micro-batch at the front and drop the oldest samples. Collective.

        Args:
            embeddings: (C, n, D) of this rank's n samples; n may differ between ranks.
        Cost: two all-gathers (see ``all_gather_rows``); copies the queue once.
        """
        length = self.embeddings.shape[1]
        # A step that the loss scaler skips may have infinities, which would stay for L samples.
        finite = torch.nan_to_num(embeddings.to(self.embeddings.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        newest = collectives.all_gather_rows(finite.transpose(0, 1)).transpose(0, 1)
        self.embeddings.copy_(torch.cat((newest, self.embeddings), dim=1)[:, :length])
        self.num_filled = min(length, self.num_filled + newest.shape[1])

    def local_part(self) -> Tensor:
        """Return this rank's share (C, q, D) of the queue; shares are consecutive, and their q differ by at most 1."""
        # Sinkhorn sums over ranks. If each rank added the whole queue, past samples would count world_size times.
        rank, world_size = collectives.rank(), collectives.world_size()
        return self.embeddings[:, rank * self.num_filled // world_size : (rank + 1) * self.num_filled // world_size]

    def get_extra_state(self) -> Tensor:
        """Return ``num_filled``, for ``state_dict``."""
        return torch.tensor(self.num_filled)

    def set_extra_state(self, state: Tensor) -> None:
        """Set ``num_filled``, from ``load_state_dict``."""
        self.num_filled = int(state)
