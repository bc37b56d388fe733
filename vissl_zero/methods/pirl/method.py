"""PIRL as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vissl_zero.methods.embedding import images_of, output_of
from vissl_zero.methods.jigsaw.loss import random_order, shuffled, tiles_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.npid.method import NPID
from vissl_zero.methods.pirl.keys import PIRLLossConfig
from vissl_zero.methods.pirl.loss import pirl_loss
from vissl_zero.registry import LOSSES


@LOSSES.register("pirl_loss", config=PIRLLossConfig)
class PIRL(NPID):
    """PIRL: an image and its shuffled tiles, each told from others by a memory of all images.

    The first crop is seen whole, the second in tiles, in an order drawn for every sample and step.

    Args: the fields of ``PIRLLossConfig``, with embedding_dim and num_towers known.
    """

    def __init__(self, num_towers: int, tile_weight: float = 0.5, **keys: Any):
        super().__init__(**keys)
        self.num_towers = num_towers
        self.tile_weight = tile_weight

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The first crop, and the tiles of the second."""
        (whole,), (other,) = images_of(batch, [0]), images_of(batch, [1])
        order = random_order(len(other), self.num_towers, "pirl", other.device)
        outputs: list[Any] = model([whole, shuffled(tiles_of(other, self.num_towers), order).flatten(0, 1)])
        return outputs

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's samples; see ``pirl_loss``. Collective in the first call only."""
        images, tiles = output_of(outputs, "tiles")
        self._note(images)
        return pirl_loss(
            images,
            tiles,
            batch.sample_ids,
            self.bank,
            self.num_negatives,
            self.temperature,
            self.tile_weight,
            use_info_nce=self.loss_type == "cross_entropy",
        )

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Remember the whole images. Collective."""
        self.bank.update(outputs[0].images.detach(), batch.sample_ids)
