"""MoCo v3 as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, output_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.moco_v3.keys import MoCoV3LossConfig
from vissl_zero.methods.moco_v3.loss import symmetric_info_nce
from vissl_zero.registry import LOSSES


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
