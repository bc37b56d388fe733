"""Regression onto the other view's target: BYOL (https://arxiv.org/abs/2006.07733, equation 2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


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
