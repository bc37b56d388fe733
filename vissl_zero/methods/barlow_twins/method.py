"""Barlow Twins: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vissl_zero.methods.barlow_twins.keys import BarlowTwinsLossConfig
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.gather import at_least_float32, sum_over_ranks
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES

_BATCH_NORM_EPS = 1e-5  # the paper's code standardises with nn.BatchNorm1d(affine=False)


def cross_correlation(first: Tensor, second: Tensor, eps: float = _BATCH_NORM_EPS) -> Tensor:
    """Correlation (D, D) of the features of two views over the samples of all ranks; differentiable. Collective.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples; not standardised.
        eps: added to the variances.
    Cost: two all-reduces, of 2D + 1 and D * D + 2D numbers, and as many in the backward pass.
    """
    dim = first.shape[1]
    views = at_least_float32(torch.stack((first, second)))
    num_local = views.new_tensor([views.shape[1]])
    sums = sum_over_ranks(torch.cat((views.sum(dim=1).flatten(), num_local)))
    num_global = sums[-1]
    # Deviations from the mean are squared, not the values: sums of squares would lose half of the digits.
    views = views - (sums[:-1] / num_global).view(2, 1, dim)
    moments = torch.cat((views.square().sum(dim=1).flatten(), (views[0].T @ views[1]).flatten()))
    moments = sum_over_ranks(moments) / num_global
    deviations = torch.sqrt(moments[: 2 * dim].view(2, dim) + eps)
    return moments[2 * dim :].view(dim, dim) / (deviations[0][:, None] * deviations[1][None])


def barlow_twins_loss(first: Tensor, second: Tensor, lambda_: float = 0.0051, scale: float = 1.0) -> Tensor:
    """Squared distance of the cross-correlation from the identity, off the diagonal weighted by ``lambda_``.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples.
        lambda_: weight of the elements off the diagonal.
        scale: factor of the whole (VISSL's ``scale_loss``).
    Returns:
        0-d, the same on every rank: a function of the whole batch.
    Cost: see ``cross_correlation``.
    """
    correlation = cross_correlation(first, second)
    diagonal = correlation.diagonal()
    on_diagonal = (diagonal - 1).square().sum()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return scale * (on_diagonal + lambda_ * off_diagonal)


@LOSSES.register("barlow_twins_loss", config=BarlowTwinsLossConfig)
class BarlowTwins(EmbeddingMethod):
    """Barlow Twins: cross-correlation of two views towards the identity.

    Args: the fields of ``BarlowTwinsLossConfig``.
    """

    def __init__(self, lambda_: float = 0.0051, scale_loss: float = 0.024):
        super().__init__()
        self.lambda_ = lambda_
        self.scale_loss = scale_loss

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The same on every rank; see ``barlow_twins_loss``. Collective."""
        first, second = crops_of(outputs[0], 2, batch)
        self._note(first)
        return barlow_twins_loss(first, second, self.lambda_, self.scale_loss)
