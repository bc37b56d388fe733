"""Whitened principal components of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vissl_zero.collectives import all_reduce_sum


@dataclass(frozen=True)
class Whitening:
    """Principal components of unit variance.

    Attributes:
        mean: (F,).
        components: (F, D).
    """

    mean: Tensor
    components: Tensor

    @classmethod
    def of(cls, rows: Tensor, num_components: int) -> Whitening:
        """Of rows (N, F), in float64; as in VISSL by the sum of squares, not their mean.

        Args:
            rows: N features.
            num_components: D at most; those of largest variance. -1: F.
        """
        mean = rows.double().mean(dim=0)
        centred = rows.double() - mean
        return cls._of_squares(mean, centred.T @ centred, num_components)

    @classmethod
    def of_all_ranks(cls, own_rows: Tensor, num_components: int) -> Whitening:
        """The same of the rows of all ranks, of which each may have another number. Collective.

        Cost: two all-reduces, of F and of F * F numbers.
        """
        count = all_reduce_sum(torch.tensor([len(own_rows)], dtype=torch.float64, device=own_rows.device))
        mean = all_reduce_sum(own_rows.double().sum(dim=0)) / count
        centred = own_rows.double() - mean
        return cls._of_squares(mean, all_reduce_sum(centred.T @ centred), num_components)

    @classmethod
    def _of_squares(cls, mean: Tensor, squares: Tensor, num_components: int) -> Whitening:
        variances, vectors = torch.linalg.eigh(squares)
        variances = variances.clamp(min=float(variances.max()) * 1e-5)
        largest = variances.argsort(descending=True)[: num_components if num_components > 0 else None]
        return cls(mean, vectors[:, largest] / variances[largest].sqrt())

    def __call__(self, rows: Tensor) -> Tensor:
        return ((rows.double() - self.mean) @ self.components).to(rows.dtype)
