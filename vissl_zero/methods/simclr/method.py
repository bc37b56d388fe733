"""SimCLR as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vissl_zero.methods.embedding import EmbeddingMethod, crops_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simclr.keys import SimCLRLossConfig
from vissl_zero.methods.simclr.loss import nt_xent
from vissl_zero.registry import LOSSES


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
