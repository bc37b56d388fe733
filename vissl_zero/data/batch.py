"""One micro-batch as the training loop, the model and the loss see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """This rank's part of one global micro-batch, crops grouped by resolution.

    Attributes:
        images: one tensor per resolution, (num_crops[r] * B, 3, H_r, W_r), crop-major: row j shows crop j // B of
            sample j % B. Resolutions come in the order in which the transforms first made them.
        num_crops: crops per sample at each resolution.
        targets: (B,) int64 labels, or None when the source has none.
        sample_ids: (B,) int64, each sample's index in the source. A sample replaced because its file is broken keeps
            its own index here; image and label are the replacement's.
        num_global: samples of this micro-batch over all ranks, right for a partial last batch too.
    """

    images: list[Tensor]
    num_crops: list[int]
    targets: Tensor | None
    sample_ids: Tensor
    num_global: int

    @property
    def num_local(self) -> int:
        """B, the samples of this micro-batch on this rank; ranks differ by one at most."""
        return len(self.sample_ids)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        """The batch on ``device``, images as ``dtype``; asynchronous from pinned memory."""
        return replace(
            self,
            images=[image.to(device=device, dtype=dtype, non_blocking=True) for image in self.images],
            targets=None if self.targets is None else self.targets.to(device, non_blocking=True),
            sample_ids=self.sample_ids.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; torch's DataLoader calls this where CUDA is used."""
        return replace(
            self,
            images=[image.pin_memory() for image in self.images],
            targets=None if self.targets is None else self.targets.pin_memory(),
            sample_ids=self.sample_ids.pin_memory(),
        )
