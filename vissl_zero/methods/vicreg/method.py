"""VICReg: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples
from vissl_zero.methods.method import Batch
from vissl_zero.methods.vicreg.keys import VICRegLossConfig
from vissl_zero.registry import LOSSES

_VARIANCE_EPS = 1e-4


def vicreg_loss(
    first: Tensor,
    second: Tensor,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    counts: SampleCounts | None = None,
) -> Tensor:
    """Weighted sum of the three terms; variance and covariance are those of the samples of all ranks.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples.
        invariance, variance, covariance: weights of the terms.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d. The invariance term is the mean over this rank's samples; the others are the same on every rank.
    Cost: an all-gather of 2n rows and an all-reduce of 2N rows in the backward pass; 2 * N * D * D multiplications.
    """
    counts = counts or count_samples(len(first), first.device)
    views = at_least_float32(torch.stack((first, second), dim=1))  # (n, 2, D)
    dim = views.shape[2]
    distance = (views[:, 0] - views[:, 1]).square().sum() / max(counts.local * dim, 1)
    everyone = gather_samples(views, counts).transpose(0, 1)
    centred = everyone - everyone.mean(dim=1, keepdim=True)
    # One sample has no variance: torch.var would give NaN.
    divisor = max(counts.total - 1, 1)
    deviations = torch.sqrt(centred.square().sum(dim=1) / divisor + _VARIANCE_EPS)
    spread = F.relu(1 - deviations).mean(dim=1).sum() / 2
    covariances = centred.transpose(1, 2) @ centred / divisor
    diagonal = covariances.diagonal(dim1=1, dim2=2)
    redundancy = (covariances.square().sum() - diagonal.square().sum()) / dim
    return invariance * distance + variance * spread + covariance * redundancy


@LOSSES.register("vicreg_loss", config=VICRegLossConfig)
class VICReg(EmbeddingMethod):
    """VICReg: variance, invariance and covariance of two views.

    Args: the fields of ``VICRegLossConfig``.
    """

    def __init__(self, sim_coeff: float = 25.0, std_coeff: float = 25.0, cov_coeff: float = 1.0):
        super().__init__()
        self.weights = sim_coeff, std_coeff, cov_coeff

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """See ``vicreg_loss``. Collective."""
        first, second = crops_of(outputs[0], 2, batch)
        self._note(first)
        return vicreg_loss(first, second, *self.weights)
