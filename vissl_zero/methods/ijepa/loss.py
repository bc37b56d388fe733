"""Regression of the teacher's patch embeddings: I-JEPA (https://arxiv.org/abs/2301.08243), data2vec (2202.03555)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


def latent_regression(predictions: Tensor, embeddings: Tensor, beta: float = 1.0) -> Tensor:
    """Smooth absolute error against the teacher's embeddings, each normalised over its features.

    Args:
        predictions: (n, ..., D), as many target patches for each image.
        embeddings: same shape, the teacher's, without gradient; not normalised.
        beta: differences below it are squared; 1 in I-JEPA, 2 in data2vec for ViT-B.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    targets = F.layer_norm(at_least_float32(embeddings.detach()), embeddings.shape[-1:])
    errors = F.smooth_l1_loss(at_least_float32(predictions), targets, beta=beta, reduction="sum")
    return errors / max(predictions.numel(), 1)
