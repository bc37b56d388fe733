"""SimSiam: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.byol.method import cosine
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simsiam.keys import SimSiamLossConfig
from vissl_zero.registry import LOSSES


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
