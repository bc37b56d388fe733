"""The part of a batch that losses look at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossBatch:
    """A ``vissl_zero.methods.method.Batch`` without images."""

    num_crops: list[int]
    sample_ids: Tensor
    num_global: int
    targets: Tensor | None = None
    masks: Tensor | None = None
    boxes: Tensor | None = None

    @property
    def num_local(self) -> int:
        return len(self.sample_ids)
