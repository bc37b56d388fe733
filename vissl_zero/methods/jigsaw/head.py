"""Jigsaw's head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vissl_zero.methods.jigsaw.keys import JigsawHeadConfig
from vissl_zero.models.heads.mlp import MLP
from vissl_zero.registry import HEADS


@HEADS.register("jigsaw_head", config=JigsawHeadConfig)
class JigsawHead(nn.Module):
    """An MLP for each tile, then a linear layer for all tiles of an image side by side.

    Args: the fields of ``JigsawHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], num_towers: int = 9, num_permutations: int = 1000):
        super().__init__()
        self.num_towers = num_towers
        self.of_tile = MLP(dims, use_relu=True, skip_last_layer_relu_bn=False)
        self.of_tiles = nn.Linear(num_towers * dims[-1], num_permutations)

    def forward(self, features: Tensor) -> Tensor:
        """Features of the first tile of m images, of the second, ... (num_towers * m, F) -> (m, num_permutations)."""
        tiles = self.of_tile(features).unflatten(0, (self.num_towers, len(features) // self.num_towers))
        logits: Tensor = self.of_tiles(tiles.transpose(0, 1).flatten(1))
        return logits
