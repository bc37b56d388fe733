"""NPID as the loop runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.npid.keys import NPIDLossConfig
from vissl_zero.methods.npid.loss import MemoryBank, info_nce_loss, nce_loss
from vissl_zero.registry import LOSSES


@LOSSES.register("nce_loss_with_memory", config=NPIDLossConfig)
class NPID(EmbeddingMethod):
    """NPID: each image is told from others by a memory of all of them.

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
