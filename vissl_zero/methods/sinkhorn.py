"""Sinkhorn's algorithm over the samples of all ranks (https://arxiv.org/abs/2006.09882, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from vissl_zero.collectives import all_reduce_max, all_reduce_sum


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float, num_iters: int, counts: Tensor | None = None, powerlaw: float = 0.0
) -> Tensor:
    """Soft assignments that use all prototypes equally (or by a power law) over the samples of all ranks.

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
    """(C, n, K) -> (C, 1, K) over the samples of all ranks that count; a rank without any adds nothing."""
    if counts is not None:
        logits = logits.masked_fill(~counts[:, :, None], -torch.inf)
    local = torch.logsumexp(logits, dim=1, keepdim=True)
    # Of all ranks, so that the exponentials below overflow on none of them.
    largest = all_reduce_max(local)
    total = largest + torch.log(all_reduce_sum(torch.exp(local - largest)))
    # No sample counts on any rank: nothing to share out, and -inf - -inf above.
    return total if counts is None else torch.where(largest == -torch.inf, 0.0, total)
