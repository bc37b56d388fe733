"""Focal loss (https://arxiv.org/abs/1708.02002): cross-entropy that cares less for what is easy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.method import Batch, Method
from vissl_zero.registry import LOSSES


@dataclass
class FocalLossConfig:
    """Keys of ``config.LOSS.focal_loss``."""

    gamma: float = 2.0
    """How fast the weight of a sample falls with the probability of its class; 0: plain cross-entropy."""

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError("gamma must be at least 0")


@LOSSES.register("focal_loss", config=FocalLossConfig)
class FocalLoss(Method):
    """Cross-entropy of each sample times (1 - p) ** gamma, p the probability of its class."""

    def __init__(self, gamma: float):
        super().__init__()
        self.gamma = gamma

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Mean over this rank's rows; the loop weighs the ranks."""
        assert batch.targets is not None, "focal_loss needs labels"
        targets = batch.targets.repeat(sum(batch.num_crops))
        losses = F.cross_entropy(outputs[0], targets, reduction="none")
        return (losses * (1 - (-losses).exp()) ** self.gamma).mean()
