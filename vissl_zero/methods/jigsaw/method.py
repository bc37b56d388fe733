"""Jigsaw as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.methods.jigsaw.keys import JigsawLossConfig
from vissl_zero.methods.jigsaw.loss import permutations, shuffled, tiles_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.pretext import PretextTask
from vissl_zero.models.keyed_random import keyed_bits
from vissl_zero.registry import LOSSES


@LOSSES.register("jigsaw_loss", config=JigsawLossConfig)
class Jigsaw(PretextTask):
    """Jigsaw: in which order the tiles of an image were put; one of a set is drawn for every sample, crop and step.

    Args: the fields of ``JigsawLossConfig``, known.
    """

    orders: Tensor

    def __init__(self, num_towers: int, num_permutations: int):
        super().__init__(num_permutations)
        self.num_towers = num_towers
        # A constant: it is not saved.
        self.register_buffer("orders", permutations(num_towers, num_permutations), persistent=False)

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The tiles of every crop, rows by place, then by crop, then by sample."""
        (images,) = batch.images
        orders = self.orders[self.labels(batch, len(images), images.device)]
        outputs: list[Any] = model([shuffled(tiles_of(images, self.num_towers), orders).flatten(0, 1)])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Numbers of the orders; see ``PretextTask``."""
        return keyed_bits(num_rows, 1, "jigsaw", device)[:, 0] % self.num_classes
