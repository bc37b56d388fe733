"""Negative cosine similarity with a stopped gradient: SimSiam (https://arxiv.org/abs/2011.10566, equation 4)."""

from __future__ import annotations

from torch import Tensor

from vissl_zero.methods.byol.loss import cosine


def simsiam_loss(predictions: tuple[Tensor, Tensor], projections: tuple[Tensor, Tensor]) -> Tensor:
    """Mean of both directions; no gradient goes into the projections.

    Args:
        predictions: (n, D) of each view, from the predictor.
        projections: (n, D) of each view, what the predictor was given.
    Returns:
        0-d: the mean over this rank's samples, between -1 and 1. No communication.
    """
    return -(cosine(predictions[0], projections[1]) + cosine(predictions[1], projections[0])) / 2
