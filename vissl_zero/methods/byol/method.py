"""BYOL: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.byol.keys import BYOLLossConfig
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch
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
