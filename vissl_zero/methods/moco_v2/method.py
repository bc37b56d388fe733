"""MoCo v2 as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, images_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.moco_v2.keys import MoCoLossConfig
from vissl_zero.methods.moco_v2.loss import KeyQueue, info_nce
from vissl_zero.registry import LOSSES


@LOSSES.register("moco_loss", config=MoCoLossConfig)
class MoCoV2(EmbeddingMethod):
    """MoCo v2: InfoNCE against a queue of the teacher's keys.

    The student sees the first crop, the teacher the second. Batch norm over one batch of all ranks
    (``SYNC_BN_CONFIG``) stands in for MoCo's shuffling of the batch.

    Args: the fields of ``MoCoLossConfig``, with embedding_dim known.
    """

    has_teacher = True

    def __init__(self, embedding_dim: int, queue_size: int = 65536, momentum: float = 0.999, temperature: float = 0.2):
        super().__init__()
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.constant_momentum = momentum
        self.temperature = temperature
        self._keys: Tensor | None = None

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Queries: the first crop."""
        outputs: list[Any] = model(images_of(batch, [0]))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Keys: the second crop."""
        outputs: list[Any] = model(images_of(batch, [1]))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``info_nce``."""
        (queries,), (keys,) = crops_of(outputs[0], 1, batch), crops_of(taught[0], 1, batch)
        self._note(queries)
        self._keys = keys
        return info_nce(queries, keys, self.queue.keys, self.temperature)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Queue the keys. Collective."""
        assert self._keys is not None
        self.queue.push(self._keys)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self.constant_momentum
