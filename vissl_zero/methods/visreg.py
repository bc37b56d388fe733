"""VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian.

Predicts the views' mean as LeJEPA does, but has separate terms for the center, scale and shape of the embeddings, so
that each term has a gradient when the embeddings collapse (https://arxiv.org/abs/2606.02572).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32, gather_samples
from vissl_zero.methods.lejepa import SlicedMethod, distance_from_mean
from vissl_zero.methods.method import Batch
from vissl_zero.methods.visreg_keys import VISRegLossConfig
from vissl_zero.registry import LOSSES

_DEVIATION_EPS = 1e-6


def normal_quantiles(count: int, like: Tensor) -> Tensor:
    """Compute the quantiles i / (count + 1) of a standard normal distribution, for i from 1 to ``count``."""
    shares = torch.arange(1, count + 1, dtype=like.dtype, device=like.device) / (count + 1)
    return torch.special.ndtri(shares)


def visreg(views: Tensor, directions: Tensor) -> Tensor:
    """Sum the squared distances of center, scale and shape from those of a standard normal distribution.

    Center and scale are the mean and the deviation of each feature. The distance of the shape is the sliced Wasserstein
    distance of the standardized embeddings: sorted projections against a normal distribution's quantiles, averaged over
    directions.

    Args:
        views: (V, n, D) embeddings of this rank's samples.
        directions: (D, K) unit vectors, the same on every rank.
    Returns:
        0-d, the same on every rank: a function of the whole batch. Means over views.
    Cost: an all-gather of V * n rows, and in the backward pass an all-reduce of V * N rows; and V * N * K numbers.
    """
    # All rows, since ranks cannot sort projections by sums alone.
    rows = gather_samples(views.transpose(0, 1)).transpose(0, 1)  # (V, N, D)
    center = rows.mean(dim=1, keepdim=True)
    centered = rows - center
    # vector_norm has the gradient 0 at 0; that of sqrt would be infinite.
    norms = torch.linalg.vector_norm(centered, dim=1, keepdim=True)
    deviations = norms / math.sqrt(max(rows.shape[1], 1)) + _DEVIATION_EPS
    # Detached: the shape has no gradient with respect to the scale, which has a term of its own.
    sorted_rows = (centered / deviations.detach() @ directions).sort(dim=1).values
    quantiles = normal_quantiles(rows.shape[1], rows)[:, None]
    terms = center, deviations - 1, sorted_rows - quantiles
    return torch.stack([term.square().mean() for term in terms]).sum()


def visreg_loss(views: Tensor, num_global: int, directions: Tensor, weight: float) -> Tensor:
    """Compute the weighted sum of ``visreg`` and the squared distance of all views from the mean of the global views.

    Args:
        views: (V, n, D) embeddings; the global views come first.
        num_global: number of global views.
        directions: (D, K), see ``visreg``.
        weight: weight of ``visreg``; the distance has 1 - weight.
    Returns:
        0-d. The distance is the mean over this rank's samples; ``visreg`` is the same on every rank.
    """
    rows = at_least_float32(views)
    return (1 - weight) * distance_from_mean(rows, num_global) + weight * visreg(rows, directions)


@LOSSES.register("visreg_loss", config=VISRegLossConfig)
class VISReg(SlicedMethod):
    """VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian.

    Args: the fields of ``VISRegLossConfig``, with num_global_crops known.
    """

    def __init__(self, num_global_crops: int = 2, lambda_: float = 0.9, num_slices: int = 4096):
        super().__init__(num_global_crops, lambda_, num_slices)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute ``visreg_loss``. Collective."""
        views, directions = self.views_and_directions(outputs, batch)
        return visreg_loss(views, self.num_global_crops, directions, self.weight)
