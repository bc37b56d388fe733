"""SimCLR: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simclr.keys import SimCLRLossConfig
from vissl_zero.registry import LOSSES


def nt_xent(first: Tensor, second: Tensor, temperature: float, counts: SampleCounts | None = None) -> Tensor:
    """Cross-entropy of finding the other view of an image among both views of all images of all ranks.

    Args:
        first, second: (n, D) embeddings of the two views of this rank's samples; not normalised.
        temperature: divides the cosine similarities.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d, the mean over this rank's 2n views.
    Cost: an all-gather of 2n rows, and an all-reduce of 2N rows in the backward pass.
    """
    counts = counts or count_samples(len(first), first.device)
    views = F.normalize(at_least_float32(torch.stack((first, second))), dim=2)
    everyone = gather_samples(views.transpose(0, 1), counts).transpose(0, 1)
    logits = views.flatten(0, 1) @ everyone.flatten(0, 1).T / temperature  # (2n, 2N), both view-major
    own = counts.first + torch.arange(counts.local, device=logits.device)
    itself, other_view = torch.cat((own, own + counts.total)), torch.cat((own + counts.total, own))
    logits = logits.scatter(1, itself[:, None], -torch.inf)
    return F.cross_entropy(logits, other_view, reduction="sum") / max(len(logits), 1)


@LOSSES.register("simclr_info_nce_loss", config=SimCLRLossConfig)
class SimCLR(EmbeddingMethod):
    """SimCLR: NT-Xent between two views, negatives from all ranks.

    Args: the fields of ``SimCLRLossConfig``.
    """

    def __init__(self, temperature: float = 0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's views; see ``nt_xent``. Collective."""
        first, second = crops_of(outputs[0], 2, batch)
        self._note(first)
        return nt_xent(first, second, self.temperature)
