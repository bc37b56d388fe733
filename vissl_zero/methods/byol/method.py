"""BYOL as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.byol.keys import BYOLLossConfig
from vissl_zero.methods.byol.loss import byol_loss
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


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
