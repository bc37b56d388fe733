"""LeJEPA: views agree, and their embeddings are an isotropic Gaussian. No teacher, no queue, no stopped gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32, sum_over_ranks
from vissl_zero.methods.lejepa_keys import LeJEPALossConfig
from vissl_zero.methods.method import Batch, EmbeddingMethod
from vissl_zero.registry import LOSSES


def random_directions(dim: int, num_slices: int, step: int, like: Tensor) -> Tensor:
    """Draw random unit vectors (dim, num_slices), the same on every rank and different in each step.

    Args:
        dim: D.
        num_slices: number of vectors.
        step: optimizer step, the seed.
        like: tensor with the device and dtype of the result.
    """
    # On the CPU: CUDA's generator draws other numbers. The seed is the step, so micro-batches, ranks and resumed runs
    # draw the same vectors without communication.
    drawn = torch.randn(dim, num_slices, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (drawn / drawn.norm(dim=0)).to(device=like.device, dtype=like.dtype)


def sigreg(views: Tensor, directions: Tensor, num_points: int, max_point: float) -> Tensor:
    """Compute the Epps-Pulley test statistic of each view's embeddings against a standard normal distribution.

    The statistic is the squared distance of characteristic functions under a Gaussian window, times the number of
    samples of all ranks, averaged over views and directions (https://arxiv.org/abs/2511.08544, section 4 and algorithm
    1).

    Args:
        views: (V, n, D) embeddings of this rank's samples.
        directions: (D, K) unit vectors, the same on every rank.
        num_points: number of integration points T, from 0 to ``max_point``.
        max_point: last integration point.
    Returns:
        0-d, the same on every rank: a function of the whole batch.
    Cost: one all-reduce of 2 * V * K * T + 1 numbers, and again in the backward pass; V * n * K * T numbers of memory.
    """
    rows = at_least_float32(views)
    # Half of the line is enough: the integrand is symmetric.
    points = torch.linspace(0, max_point, num_points, dtype=rows.dtype, device=rows.device)
    angles = (rows @ directions)[..., None] * points  # (V, n, K, T)
    sums = torch.stack([angles.cos().sum(dim=1), angles.sin().sum(dim=1)])
    # A characteristic function is a mean over samples, so sums of cosines and sines are all that ranks exchange.
    totals = sum_over_ranks(torch.cat([sums.flatten(), sums.new_tensor([rows.shape[1]])]))
    num_samples = totals[-1].detach()
    cosines, sines = totals[:-1].view_as(sums) / num_samples.clamp(min=1)
    window = torch.exp(-points.square() / 2)  # also the characteristic function of a standard normal distribution
    weights = torch.full_like(points, 2 * max_point / (num_points - 1))  # twice the step: both halves of the line
    weights[[0, -1]] /= 2  # the trapezoidal rule
    distances = (cosines - window).square() + sines.square()
    return (distances @ (weights * window)).mean() * num_samples


def distance_from_mean(views: Tensor, num_global: int) -> Tensor:
    """Compute the mean squared distance of all views from the mean of the global views, over this rank's samples.

    Args:
        views: (V, n, D) embeddings; the global views come first.
        num_global: number of global views.
    Returns:
        0-d. No communication.
    """
    # The mean has a gradient too: LeJEPA has no stop-gradient, and SIGReg prevents the collapse.
    squares = (views - views[:num_global].mean(dim=0)).square().sum()
    return squares / max(views.numel(), 1)


def lejepa_loss(
    views: Tensor, num_global: int, directions: Tensor, weight: float, num_points: int, max_point: float
) -> Tensor:
    """Compute the weighted sum of SIGReg and the squared distance of all views from the mean of the global views.

    Args:
        views: (V, n, D) embeddings; the global views come first.
        num_global: number of global views.
        directions: (D, K), see ``sigreg``.
        weight: weight of SIGReg; the distance has 1 - weight.
        num_points, max_point: see ``sigreg``.
    Returns:
        0-d. The distance is the mean over this rank's samples; SIGReg is the same on every rank.
    """
    rows = at_least_float32(views)
    regularized = sigreg(rows, directions, num_points, max_point)
    return (1 - weight) * distance_from_mean(rows, num_global) + weight * regularized


class SlicedMethod(EmbeddingMethod):
    """Base of methods that compare the batch with a Gaussian along random directions, new ones in each step.

    Args:
        num_global_crops: number of crops, from the first, whose mean all crops approach.
        weight: weight of the comparison; the distance from the mean has 1 - weight.
        num_slices: number of directions.
    """

    def __init__(self, num_global_crops: int, weight: float, num_slices: int):
        super().__init__()
        self.num_global_crops = num_global_crops
        self.weight = weight
        self.num_slices = num_slices

    def views_and_directions(self, outputs: list[Any], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the embeddings by view, (V, n, D), and the step's directions, (D, K)."""
        views = at_least_float32(outputs[0].unflatten(0, (sum(batch.num_crops), batch.num_local)))
        self._note(views[0])
        return views, random_directions(views.shape[2], self.num_slices, self._step, views)


@LOSSES.register("lejepa_loss", config=LeJEPALossConfig)
class LeJEPA(SlicedMethod):
    """LeJEPA: views agree, and their embeddings are an isotropic Gaussian.

    Args: the fields of ``LeJEPALossConfig``, with num_global_crops known.
    """

    def __init__(
        self,
        num_global_crops: int = 2,
        lambda_: float = 0.05,
        num_slices: int = 1024,
        num_points: int = 17,
        max_point: float = 3.0,
    ):
        super().__init__(num_global_crops, lambda_, num_slices)
        self.points = num_points, max_point

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute ``lejepa_loss``. Collective."""
        views, directions = self.views_and_directions(outputs, batch)
        return lejepa_loss(views, self.num_global_crops, directions, self.weight, *self.points)
