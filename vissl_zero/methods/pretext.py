"""What pretext tasks have in common: classification by labels that the method makes itself."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch, Method


class PretextTask(Method):
    """Base of methods that guess what was done to an image; define ``labels``, and ``run_student``, which does it.

    Args:
        num_classes: what may have been done.
    """

    couples_samples = False

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.guessing_loss = math.log(num_classes)
        self._counts: Tensor | None = None

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """(num_rows,) int64: what was done to each row of the outputs."""
        raise NotImplementedError

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Cross-entropy, the mean over this rank's samples. No communication.

        Raises:
            ConfigError: the head has other outputs than there are classes.
        """
        logits: Tensor = at_least_float32(outputs[0])
        if logits.shape[1] != self.num_classes:
            must = f"must end in {self.num_classes} outputs"
            got = f"{logits.shape[1]} outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", got, must, "Correct the last width.")])
        labels = self.labels(batch, len(logits), logits.device)
        right = (logits.detach().argmax(dim=1) == labels).sum()
        self._counts = torch.stack((right.new_tensor(len(logits)), right))
        return F.cross_entropy(logits, labels, reduction="sum") / max(len(logits), 1)

    def health_sums(self) -> Tensor:
        """Rows of the last micro-batch, and those that are guessed right."""
        return super().health_sums() if self._counts is None else self._counts

    def health(self, sums: Tensor) -> dict[str, float]:
        """``pretext_top1``: share of rows whose class is guessed right."""
        if self._counts is None:
            return {}
        num_rows, right = sums.tolist()
        return {"pretext_top1": right / max(num_rows, 1)}
