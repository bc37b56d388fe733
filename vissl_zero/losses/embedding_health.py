"""Figures that show a self-supervised model collapsing before its loss does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def clustering_sums(embeddings: Tensor, assignments: Sequence[Tensor]) -> Tensor:
    """What ``clustering_health`` needs of each rank's samples, to be summed over ranks.

    Args:
        embeddings: (m, D) of this rank; any m.
        assignments: per layer of prototypes (m, K_i), rows sum to 1.
    Returns:
        1-d, float64: X^T X of the embeddings, m, and per layer the sum of entropies and how many rows each prototype is
        the first choice of.
    """
    wide = embeddings.double()
    parts = [(wide.T @ wide).flatten(), wide.new_tensor([len(wide)])]
    for rows in assignments:
        probabilities = rows.double()
        parts.append(-torch.xlogy(probabilities, probabilities).sum().reshape(1))
        parts.append(torch.bincount(probabilities.argmax(dim=1), minlength=rows.shape[1]).double())
    return torch.cat(parts)


def clustering_health(sums: Tensor, dim: int, num_prototypes: Sequence[int]) -> dict[str, float]:
    """Assignment entropy, prototypes in use and effective rank.

    Args:
        sums: ``clustering_sums`` over all samples.
        dim: D, of the embeddings.
        num_prototypes: K_i of each layer.
    Returns:
        ``assignment_entropy``: mean entropy of a row over ln K, mean over layers; 1: samples are told apart no more.
        ``prototypes_in_use``: prototypes that are the first choice of at least one row, summed over layers.
        ``effective_rank``: see ``effective_rank``; 1: all embeddings point the same way.
    Cost: one transfer to the host and the eigenvalues of a D x D matrix.
    """
    sizes = [dim * dim, 1, *(size for count in num_prototypes for size in (1, count))]
    gram, num_rows, *per_layer = sums.cpu().split(sizes)
    entropies, counts = per_layer[::2], per_layer[1::2]
    count = max(float(num_rows), 1.0)
    # ln 1 is 0: a single prototype has no entropy to speak of.
    scales = [count * max(math.log(number), 1e-12) for number in num_prototypes]
    return {
        "assignment_entropy": sum(float(e) / s for e, s in zip(entropies, scales, strict=True)) / len(scales),
        "prototypes_in_use": float(sum(int((c > 0).sum()) for c in counts)),
        "effective_rank": effective_rank(gram.view(dim, dim)),
    }


def effective_rank(gram: Tensor) -> float:
    """Exponential of the entropy of the normalised singular values (Roy and Vetterli 2007; RankMe, arXiv 2210.02885).

    Args:
        gram: (D, D) float64, X^T X of the rows X, not centred: a model that gives one vector for all has rank 1.
    Returns:
        Between 1 and D; NaN for a matrix with NaN or infinity, 0 for no rows.
    """
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    singular_values = torch.linalg.eigvalsh(gram).clamp(min=0.0).sqrt()
    total = float(singular_values.sum())
    if total == 0.0:
        return 0.0
    shares = singular_values / total
    return math.exp(float(-torch.xlogy(shares, shares).sum()))
