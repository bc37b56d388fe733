"""NPID: its loss, and the method as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch
from vissl_zero.methods.npid.keys import NPIDLossConfig
from vissl_zero.models.keyed_random import keyed_bits
from vissl_zero.registry import LOSSES

# VISSL adds float32's epsilon to the denominators, in every number format.
_EPS = torch.finfo(torch.float32).eps


class MemoryBank(nn.Module):
    """One embedding for each image of the data set, identical on every rank.

    Args:
        num_images: S, of the data set.
        embedding_dim: D.
        momentum: weight of what is remembered.
        seed: of the first, random embeddings.

    Attributes:
        memory: buffer (S, D), unit rows. It takes S * D numbers on every rank.
        normalizer: buffer, 0-d: the constant Z of the paper.
        has_normalizer: the first batch has set it. On the host: reading it from the device would wait for the device.
    """

    memory: Tensor
    normalizer: Tensor

    def __init__(self, num_images: int, embedding_dim: int, momentum: float = 0.5, seed: int = 0):
        super().__init__()
        self.momentum = momentum
        bound = 1 / math.sqrt(embedding_dim / 3)
        generator = torch.Generator().manual_seed(seed)
        first = torch.empty(num_images, embedding_dim).uniform_(-bound, bound, generator=generator)
        self.register_buffer("memory", F.normalize(first, dim=1))
        self.register_buffer("normalizer", torch.tensor(-1.0))
        self.has_normalizer = False

    def get_extra_state(self) -> Tensor:
        """``has_normalizer``, for ``state_dict``."""
        return torch.tensor(self.has_normalizer)

    def set_extra_state(self, state: Tensor) -> None:
        """``has_normalizer``, from ``load_state_dict``."""
        self.has_normalizer = bool(state)

    def draw_negatives(self, num_samples: int, num_negatives: int, layer: str = "memory_bank") -> Tensor:
        """Images to contrast with, drawn per sample from (seed, step, sample): the same on any number of ranks.

        Args:
            num_samples: n, those that ``set_random_key`` was given.
            num_negatives: M.
            layer: part of the key.
        Returns:
            (n, M) int64 indices into the memory, with replacement.
        """
        return keyed_bits(num_samples, num_negatives, layer, self.memory.device) % len(self.memory)

    def similarities(self, embeddings: Tensor, sample_ids: Tensor, negatives: Tensor) -> Tensor:
        """Cosine similarity to an image's own memory, then to those of its negatives.

        Args:
            embeddings: (n, D); not normalised.
            sample_ids: (n,) index of each image in the data set.
            negatives: (n, M) indices.
        Returns:
            (n, 1 + M).
        """
        rows = F.normalize(at_least_float32(embeddings), dim=1)
        remembered = self.memory[torch.cat((sample_ids[:, None], negatives), dim=1)].to(rows.dtype)
        return torch.einsum("nd,nmd->nm", rows, remembered)

    @torch.no_grad()
    def update(self, embeddings: Tensor, sample_ids: Tensor) -> None:
        """Move the memory of the images of all ranks towards their embeddings. Collective.

        Args:
            embeddings: (n, D) of this rank; not normalised. Rows that are not finite are left out.
            sample_ids: (n,), different from each other over all ranks.
        Cost: two gathers of rows (see ``collectives.all_gather_rows``).
        """
        rows = F.normalize(at_least_float32(embeddings), dim=1).to(self.memory.dtype)
        rows, indices = collectives.all_gather_rows(rows), collectives.all_gather_rows(sample_ids)
        before = self.memory[indices]
        after = F.normalize(before * self.momentum + rows * (1 - self.momentum), dim=1)
        self.memory[indices] = torch.where(rows.isfinite().all(dim=1, keepdim=True), after, before)


def nce_loss(similarities: Tensor, bank: MemoryBank, temperature: float) -> Tensor:
    """Noise-contrastive estimation: tell the image from its negatives (equation 7). The first call sets the bank's Z.

    Args:
        similarities: (n, 1 + M), see ``MemoryBank.similarities``.
        temperature: divides them.
    Returns:
        0-d, the mean over this rank's samples. Collective in the first call only.
    """
    scores = torch.exp(similarities / temperature)
    num_images, num_negatives = len(bank.memory), scores.shape[1] - 1
    if not bank.has_normalizer:
        _set_normalizer(bank, scores.detach())
    probabilities = scores / bank.normalizer
    noise = num_negatives / num_images
    from_data = torch.log(probabilities[:, 0] / (probabilities[:, 0] + noise + _EPS))
    from_noise = torch.log(noise / (probabilities[:, 1:] + noise + _EPS))
    return -(from_data.sum() + from_noise.sum()) / max(len(scores), 1)


def info_nce_loss(similarities: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding the image among itself and its negatives (NPID++).

    Args:
        similarities: (n, 1 + M), see ``MemoryBank.similarities``.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    logits = similarities / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).sum() / max(len(logits), 1)


@torch.no_grad()
def _set_normalizer(bank: MemoryBank, scores: Tensor) -> None:
    """Z: the mean score of the first batch of all ranks, times the number of images."""
    sums = collectives.all_reduce_sum(torch.stack((scores.sum(), scores.new_tensor(scores.numel()))))
    bank.normalizer.copy_(sums[0] / sums[1] * len(bank.memory))
    bank.has_normalizer = True


@LOSSES.register("nce_loss_with_memory", config=NPIDLossConfig)
class NPID(EmbeddingMethod):
    """NPID: each image is a class of its own; a memory bank of all images supplies the negatives.

    Args: the fields of ``NPIDLossConfig``, with embedding_dim known.
    """

    bank: MemoryBank

    def __init__(
        self,
        embedding_dim: int,
        loss_type: str = "nce",
        temperature: float = 0.07,
        negative_sampling_params: Mapping[str, int] | None = None,
        memory_params: Mapping[str, float] | None = None,
    ):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.loss_type = loss_type
        self.temperature = temperature
        self.num_negatives = (negative_sampling_params or {}).get("num_negatives", 16000)
        self.memory_momentum = (memory_params or {}).get("momentum", 0.5)

    def set_images(self, num_images: int) -> None:
        """A random memory of each."""
        self.bank = MemoryBank(num_images, self.embedding_dim, self.memory_momentum)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's samples; see ``nce_loss``. Collective in the first call only."""
        (embeddings,) = crops_of(outputs[0], 1, batch)
        self._note(embeddings)
        negatives = self.bank.draw_negatives(len(embeddings), self.num_negatives)
        similarities = self.bank.similarities(embeddings, batch.sample_ids, negatives)
        if self.loss_type == "nce":
            return nce_loss(similarities, self.bank, self.temperature)
        return info_nce_loss(similarities, self.temperature)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Remember the images. Collective."""
        self.bank.update(outputs[0].detach(), batch.sample_ids)
