"""PIRL's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from vissl_zero.methods.pirl.keys import PIRLHeadConfig
from vissl_zero.models.heads.mlp import MLP
from vissl_zero.registry import HEADS


class PIRLOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        images: (n, D) embeddings of whole images.
        tiles: (n, D) embeddings of their tiles together.
    """

    images: Tensor
    tiles: Tensor


@HEADS.register("pirl_head", config=PIRLHeadConfig)
class PIRLHead(nn.Module):
    """Two projections: of whole images, and of tiles, which are projected one by one and then side by side.

    Args: the fields of ``PIRLHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], num_towers: int = 9):
        super().__init__()
        self.num_towers = num_towers
        self.of_image = MLP(dims, use_relu=True)
        self.of_tile = MLP(dims, use_relu=True)
        self.of_tiles = nn.Linear(num_towers * dims[-1], dims[-1])

    def forward(self, features: Tensor) -> PIRLOutput:
        """Features of n images, then of the first tile of each, of the second, ...: ((1 + num_towers) * n, F)."""
        num_images = len(features) // (1 + self.num_towers)
        tiles = self.of_tile(features[num_images:]).unflatten(0, (self.num_towers, num_images))
        return PIRLOutput(self.of_image(features[:num_images]), self.of_tiles(tiles.transpose(0, 1).flatten(1)))
