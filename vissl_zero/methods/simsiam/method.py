"""SimSiam as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simsiam.keys import SimSiamLossConfig
from vissl_zero.methods.simsiam.loss import simsiam_loss
from vissl_zero.registry import LOSSES


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
