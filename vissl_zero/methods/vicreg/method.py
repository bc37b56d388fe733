"""VICReg as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.vicreg.keys import VICRegLossConfig
from vissl_zero.methods.vicreg.loss import vicreg_loss
from vissl_zero.registry import LOSSES


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
