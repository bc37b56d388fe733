"""Contrastive losses whose positives are other images: the nearest neighbor (NNCLR) or the same class (SupCon)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.contrastive_keys import NNCLRLossConfig, SupConLossConfig
from vissl_zero.methods.gather import at_least_float32, count_samples, gather_samples
from vissl_zero.methods.method import Batch, EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.two_views import KeyQueue
from vissl_zero.registry import LOSSES


def _nearest_neighbors(rows: Tensor, queue: Tensor) -> Tensor:
    """Select the row of the queue with the largest cosine similarity to each row; without gradient.

    Args:
        rows: (n, D); not normalized.
        queue: (K, D) unit vectors.
    Returns:
        (n, D) unit vectors. n * K * D multiplications, no communication.
    """
    with torch.no_grad():
        unit = F.normalize(at_least_float32(rows))
        past = queue.to(unit.dtype)
        return F.normalize(past[(unit @ past.T).argmax(dim=1)])


def nnclr_loss(
    projections: tuple[Tensor, Tensor],
    predictions: tuple[Tensor, Tensor],
    queue: Tensor,
    temperature: float,
) -> Tensor:
    """Contrast each view's nearest neighbor with the other view's predictions of all images of all ranks.

    https://arxiv.org/abs/2104.14548, section 3.2 and algorithm 1.

    Args:
        projections: (n, D) of each view, from the projector; no gradient goes into them here.
        predictions: (n, D) of each view, from the predictor; not normalized.
        queue: (K, D) unit vectors, the same on every rank.
        temperature: divides the cosine similarities.
    Returns:
        0-d: the mean over this rank's samples and both directions.
    Cost: one all-gather of 2n rows, and an all-reduce of 2N rows in the backward pass.
    """
    counts = count_samples(len(predictions[0]), predictions[0].device)
    p = F.normalize(at_least_float32(torch.stack(predictions, dim=1)), dim=2)
    everyone = gather_samples(p, counts)  # (N, 2, D)
    labels = counts.first + torch.arange(counts.local, device=p.device)
    terms = []
    for view, projection in enumerate(projections):
        logits = _nearest_neighbors(projection, queue) @ everyone[:, 1 - view].T / temperature
        # A sum divided by hand: torch's mean over the rows of a rank without samples is NaN.
        terms.append(F.cross_entropy(logits, labels, reduction="sum") / max(counts.local, 1))
    return torch.stack(terms).mean()


@LOSSES.register("nnclr_loss", config=NNCLRLossConfig)
class NNCLR(EmbeddingMethod):
    """NNCLR: the nearest neighbor of a view in a queue is the other view's positive.

    The queue has the first view's projections of the last steps.

    Args: the fields of ``NNCLRLossConfig``, with embedding_dim known.
    """

    def __init__(self, embedding_dim: int, queue_size: int = 98304, temperature: float = 0.1):
        super().__init__()
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Return the mean over this rank's samples; see ``nnclr_loss``. Collective."""
        projections = crops_of(output_of(outputs, "projections").projections, 2, batch)
        predictions = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        self._note(projections[0])
        pairs = (projections[0], projections[1]), (predictions[0], predictions[1])
        return nnclr_loss(*pairs, self.queue.keys, self.temperature)

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the first view's projections (n, D)."""
        # Of one view, as in algorithm 1 of the paper: both views of an image would be each other's nearest neighbor.
        return crops_of(outputs[0].projections, 2, batch)[0].detach()

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the projections. Collective."""
        # After the loss, so that no image is its own nearest neighbor.
        for projections in observed:
            self.queue.push(projections)


def supcon_loss(views: Sequence[Tensor], labels: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of identifying each positive among all other views of all ranks.

    The loss is averaged over an anchor's positives: L_out of https://arxiv.org/abs/2004.11362, equation 2. The authors'
    code multiplies it by temperature / 0.07.

    Args:
        views: (n, D) embeddings of each view of this rank's samples; not normalized.
        labels: (n,) int64 classes; an image with a negative label has only its own other views as positives.
        temperature: divides the cosine similarities.
    Returns:
        0-d, the mean over this rank's V * n anchors; with one class per image it is ``nt_xent``.
    Cost: an all-gather of V * n rows and n labels, and an all-reduce of V * N rows in the backward pass.
    """
    z = F.normalize(at_least_float32(torch.stack(tuple(views), dim=1)), dim=2)  # (n, V, D)
    counts = count_samples(len(z), z.device)
    num_views = len(views)
    everyone = gather_samples(z, counts).flatten(0, 1)  # (N V, D), image by image
    positions = counts.first + torch.arange(counts.local, device=z.device)
    # Labels have no gradient, so a plain gather will do.
    every_label = collectives.all_gather_rows(labels, counts.per_rank)
    # An image without a class is a class of its own: a negative number that no other image has.
    numbers = torch.arange(counts.total, device=labels.device)
    every_label = torch.where(every_label < 0, -1 - numbers, every_label)
    same = (every_label[positions][:, None] == every_label[None]).repeat_interleave(num_views, 0)
    is_positive = same.repeat_interleave(num_views, 1)
    itself = (positions[:, None] * num_views + torch.arange(num_views, device=z.device)).flatten()[:, None]
    logits = z.flatten(0, 1) @ everyone.T / temperature
    # Not minus infinity: its product with a weight of 0 below would be NaN.
    logits = logits.scatter(1, itself, torch.finfo(logits.dtype).min / 2)
    weights = is_positive.to(logits.dtype).scatter(1, itself, 0.0)
    log_probabilities = logits - logits.logsumexp(dim=1, keepdim=True)
    of_anchor = -(weights * log_probabilities).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return of_anchor.sum() / max(len(of_anchor), 1)


@LOSSES.register("supcon_loss", config=SupConLossConfig)
class SupCon(EmbeddingMethod):
    """SupCon: all views of all images of a class are positives of each other.

    Args: the fields of ``SupConLossConfig``.
    """

    def __init__(self, temperature: float = 0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Return the mean over this rank's views; see ``supcon_loss``. Collective.

        Raises:
            ConfigError: the images have no classes.
        """
        # Mixed labels are shares of classes, and an image of two classes has no one set of positives.
        if batch.targets is None or batch.targets.dtype != torch.int64:
            must, fix = "must have a class for each image for supcon_loss", "Put the images of each class in a folder."
            raise ConfigError([Problem("config.DATA.TRAIN", "no labels", must, fix)])
        views = crops_of(outputs[0], 2, batch)
        self._note(views[0])
        return supcon_loss(views, batch.targets, self.temperature)
