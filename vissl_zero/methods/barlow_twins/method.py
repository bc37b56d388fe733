"""Barlow Twins as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.barlow_twins.keys import BarlowTwinsLossConfig
from vissl_zero.methods.barlow_twins.loss import barlow_twins_loss
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


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
