"""MoCo v3: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples
from vissl_zero.methods.method import Batch
from vissl_zero.methods.moco_v3.keys import MoCoV3LossConfig
from vissl_zero.registry import LOSSES


def symmetric_info_nce(
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    temperature: float,
    counts: SampleCounts | None = None,
) -> Tensor:
    """Each view's query finds the other view's key of the same image among the keys of all images of all ranks.

    Args:
        queries: (n, D) of each of the two views, from the student's predictor; not normalised.
        keys: (n, D) of each, from the momentum encoder; no gradient goes into them.
        temperature: divides the cosine similarities; the loss is scaled by twice its value.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d: the mean over this rank's samples, both directions added.
    Cost: one all-gather of 2n rows; none in the backward pass.
    """
    counts = counts or count_samples(len(queries[0]), queries[0].device)
    own_keys = F.normalize(at_least_float32(torch.stack(keys, dim=1).detach()), dim=2)
    every_key = gather_samples(own_keys, counts)  # (N, 2, D)
    labels = counts.first + torch.arange(counts.local, device=own_keys.device)
    terms = []
    for view, query in enumerate(queries):
        logits = F.normalize(at_least_float32(query), dim=1) @ every_key[:, 1 - view].T / temperature
        terms.append(F.cross_entropy(logits, labels, reduction="sum") / max(counts.local, 1))
    return torch.stack(terms).sum() * (2 * temperature)


@LOSSES.register("moco_v3_loss", config=MoCoV3LossConfig)
class MoCoV3(EmbeddingMethod):
    """MoCo v3: symmetric InfoNCE against the teacher's keys of the batch.

    Args: the fields of ``MoCoV3LossConfig``.
    """

    has_teacher = True

    def __init__(self, momentum: float = 0.99, temperature: float = 0.2):
        super().__init__()
        self.first_momentum = momentum
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``symmetric_info_nce``. Collective."""
        queries = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        keys = crops_of(output_of(taught, "projections").projections, 2, batch)
        self._note(outputs[0].projections)
        return symmetric_info_nce((queries[0], queries[1]), (keys[0], keys[1]), self.temperature)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)
