"""Classification with soft targets: label smoothing, mixup, CutMix and binary cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


def smooth_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot targets of which ``smoothing`` is spread evenly over all classes (https://arxiv.org/abs/1512.00567).

    Args:
        labels: (n,) int64.
    Returns:
        (n, num_classes) float32, rows sum to 1.
    """
    return F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes


def mix_targets(targets: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Targets of images mixed by mixup or CutMix (https://arxiv.org/abs/1710.09412, 1905.04899).

    Args:
        targets, partners: (n, C) of each image and of the one mixed into it.
        shares: (n,) share of the image itself; for CutMix, of its area.
    Returns:
        (n, C).
    """
    return torch.lerp(partners, targets, shares[:, None].to(targets.dtype))


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against probabilities.

    Args:
        logits: (n, C).
        targets: (n, C), rows sum to 1.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    return -(targets * F.log_softmax(at_least_float32(logits), dim=1)).sum() / max(len(logits), 1)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """One sigmoid per class, averaged over classes (https://arxiv.org/abs/2110.00476, section 3).

    Args:
        logits, targets: (n, C), targets between 0 and 1.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    logits = at_least_float32(logits)
    total = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")
    return total / max(logits.numel(), 1)
