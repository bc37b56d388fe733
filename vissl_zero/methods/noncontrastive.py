"""Two views without negatives: BYOL, SimSiam, Barlow Twins and VICReg: losses, heads, and what the loop calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples, sum_over_ranks
from vissl_zero.methods.method import Batch, EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.noncontrastive_keys import (
    BarlowTwinsLossConfig,
    BYOLLossConfig,
    SimSiamLossConfig,
    VICRegLossConfig,
)
from vissl_zero.registry import LOSSES


def cosine(predictions: Tensor, targets: Tensor) -> Tensor:
    """Mean over this rank's samples of the cosine similarity; no gradient goes into the targets.

    Args:
        predictions, targets: (n, D); not normalised.
    Returns:
        0-d. No communication.
    """
    predictions = F.normalize(at_least_float32(predictions), dim=1)
    targets = F.normalize(at_least_float32(targets.detach()), dim=1)
    return (predictions * targets).sum() / max(len(predictions), 1)


def byol_loss(predictions: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Squared distance of unit vectors, the prediction from each view against the target of the other, both added.

    Args:
        predictions: (n, D) of each view, from the student's predictor.
        targets: (n, D) of each view, from the momentum encoder.
    Returns:
        0-d: the mean over this rank's samples, between 0 and 8. No communication.
    """
    return 4 - 2 * cosine(predictions[0], targets[1]) - 2 * cosine(predictions[1], targets[0])


@LOSSES.register("byol_loss", config=BYOLLossConfig)
class BYOL(EmbeddingMethod):
    """BYOL: prediction of a teacher's projection of the other view.

    Args: the fields of ``BYOLLossConfig``.
    """

    has_teacher = True
    guessing_loss = 4.0  # unrelated directions

    def __init__(self, momentum: float = 0.99):
        super().__init__()
        self.first_momentum = momentum

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``byol_loss``."""
        predictions = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        targets = crops_of(output_of(taught, "projections").projections, 2, batch)
        self._note(outputs[0].projections)
        return byol_loss((predictions[0], predictions[1]), (targets[0], targets[1]))

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)


def simsiam_loss(predictions: tuple[Tensor, Tensor], projections: tuple[Tensor, Tensor]) -> Tensor:
    """Mean of both directions; no gradient goes into the projections.

    Args:
        predictions: (n, D) of each view, from the predictor.
        projections: (n, D) of each view, what the predictor was given.
    Returns:
        0-d: the mean over this rank's samples, between -1 and 1. No communication.
    """
    return -(cosine(predictions[0], projections[1]) + cosine(predictions[1], projections[0])) / 2


@LOSSES.register("simsiam_loss", config=SimSiamLossConfig)
class SimSiam(EmbeddingMethod):
    """SimSiam: prediction of the other view, gradient stopped."""

    guessing_loss = 0.0  # unrelated directions

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's samples; see ``simsiam_loss``."""
        projections = crops_of(output_of(outputs, "projections").projections, 2, batch)
        predictions = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        self._note(projections[0])
        return simsiam_loss((predictions[0], predictions[1]), (projections[0], projections[1]))


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
