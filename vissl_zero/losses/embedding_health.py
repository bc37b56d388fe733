"""Figures that show a self-supervised model collapsing before its loss does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vissl_zero.collectives import all_reduce_sum


@torch.no_grad()
def clustering_health(embeddings: Tensor, assignments: Sequence[Tensor]) -> dict[str, float]:
    """Assignment entropy, prototypes in use and effective rank over the samples of all ranks.

    Args:
        embeddings: (m, D) of this rank; any m.
        assignments: per layer of prototypes (m, K_i), rows sum to 1.
    Returns:
        ``assignment_entropy``: mean entropy of a row over ln K, mean over layers; 1: samples are told apart no more.
        ``prototypes_in_use``: prototypes that are the first choice of at least one row, summed over layers.
        ``effective_rank``: see ``effective_rank``; 1: all embeddings point the same way. Equal on every rank.
    Cost: one all-reduce of D**2 + sum K_i numbers in float64 and the eigenvalues of a D x D matrix.
    """
    wide = embeddings.double()
    parts = [(wide.T @ wide).flatten(), wide.new_tensor([len(wide)])]
    for rows in assignments:
        probabilities = rows.double()
        parts.append(-torch.xlogy(probabilities, probabilities).sum().reshape(1))
        parts.append(torch.bincount(probabilities.argmax(dim=1), minlength=rows.shape[1]).double())
    # One transfer to the host for everything.
    total = all_reduce_sum(torch.cat(parts)).cpu()
    dim = embeddings.shape[1]
    sizes = [dim * dim, 1, *(size for rows in assignments for size in (1, rows.shape[1]))]
    gram, num_rows, *per_layer = total.split(sizes)
    entropies, counts = per_layer[::2], per_layer[1::2]
    count = max(float(num_rows), 1.0)
    # ln 1 is 0: a single prototype has no entropy to speak of.
    scales = [count * max(math.log(rows.shape[1]), 1e-12) for rows in assignments]
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
