"""SimCLR: its loss, and the method as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simclr.keys import MultiCropSimCLRLossConfig, SimCLRLossConfig
from vissl_zero.registry import LOSSES


def nt_xent(views: Sequence[Tensor], temperature: float, counts: SampleCounts | None = None) -> Tensor:
    """Cross-entropy of finding another view of an image among all views of the other images of all ranks.

    With more than two views, each other view of the image is found by itself; the rest of them are left out.

    Args:
        views: (n, D) embeddings of each view of this rank's samples; not normalised.
        temperature: divides the cosine similarities.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d, the mean over this rank's pairs of different views of an image.
    Cost: an all-gather of V * n rows, and an all-reduce of V * N rows in the backward pass.
    """
    own = F.normalize(at_least_float32(torch.stack(tuple(views))), dim=2)
    counts = counts or count_samples(own.shape[1], own.device)
    everyone = gather_samples(own.transpose(0, 1), counts).transpose(0, 1)
    logits = own.flatten(0, 1) @ everyone.flatten(0, 1).T / temperature  # (V n, V N), both view-major
    numbers = range(len(views))
    others = torch.tensor([[other for other in numbers if other != view] for view in numbers], device=logits.device)
    image = (counts.first + torch.arange(counts.local, device=logits.device)).repeat(len(views))[:, None]
    positives = logits.gather(1, image + others.repeat_interleave(counts.local, dim=0) * counts.total)
    of_image = image + torch.arange(len(views), device=logits.device) * counts.total
    # Not minus infinity: of a single image nothing would be left, and the gradient of its logarithm is undefined.
    negatives = logits.scatter(1, of_image, torch.finfo(logits.dtype).min / 2).logsumexp(dim=1, keepdim=True)
    return (torch.logaddexp(positives, negatives) - positives).sum() / max(positives.numel(), 1)


@LOSSES.register("simclr_info_nce_loss", config=SimCLRLossConfig)
@LOSSES.register("multicrop_simclr_info_nce_loss", config=MultiCropSimCLRLossConfig)
class SimCLR(EmbeddingMethod):
    """SimCLR: NT-Xent between views, negatives from all ranks.

    Args: the fields of ``MultiCropSimCLRLossConfig``, with num_crops known.
    """

    def __init__(self, temperature: float = 0.1, num_crops: int = 2):
        super().__init__()
        self.num_crops = num_crops
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's views; see ``nt_xent``. Collective."""
        views = crops_of(outputs[0], self.num_crops, batch)
        self._note(views[0])
        return nt_xent(views, self.temperature)
