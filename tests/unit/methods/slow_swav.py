"""SwAV written out sample by sample in one process, as the paper has it: what the loss is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def slow_sinkhorn(scores: Sequence[Sequence[float]], epsilon: float, num_iters: int) -> list[list[float]]:
    """Algorithm 1 of https://arxiv.org/abs/2006.09882 in plain numbers: n rows of K scores -> n rows of K shares."""
    table = [[math.exp(score / epsilon) for score in row] for row in scores]
    num_rows, num_prototypes = len(table), len(table[0])
    for _ in range(num_iters):
        for k in range(num_prototypes):
            total = sum(row[k] for row in table)
            for row in table:
                row[k] /= total * num_prototypes
        for row in table:
            total = sum(row)
            for k in range(num_prototypes):
                row[k] /= total * num_rows
    return [[value / sum(row) for value in row] for row in table]


def slow_swav(
    embeddings: Tensor,
    prototypes: Sequence[Tensor],
    queues: Sequence[Tensor],
    crops_for_assign: Sequence[int],
    epsilon: float,
    num_iters: int,
    temperature: float,
    is_hard: bool = False,
) -> Tensor:
    """The loss, differentiable in embeddings (V, B, D) and prototypes (K_i, D); one queue (q, D) per assigned crop."""
    num_crops, num_samples, _ = embeddings.shape
    total = embeddings.new_zeros(())
    for weights in prototypes:
        for crop, queue in zip(crops_for_assign, queues, strict=True):
            rows = torch.cat((embeddings[crop], queue)).detach() @ weights.detach().T
            assigned = slow_sinkhorn(rows.tolist(), epsilon, num_iters)
            for sample in range(num_samples):
                target = assigned[sample]
                if is_hard:
                    target = [float(k == target.index(max(target))) for k in range(len(target))]
                for other in range(num_crops):
                    if other != crop:
                        scores = weights @ embeddings[other, sample] / temperature
                        log_probabilities = scores - torch.logsumexp(scores, 0)
                        for k, share in enumerate(target):
                            total = total - share * log_probabilities[k]
    return total / (len(prototypes) * len(crops_for_assign) * num_samples * (num_crops - 1))
