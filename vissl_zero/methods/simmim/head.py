"""SimMIM's head: a linear layer from tokens to pixels (https://arxiv.org/abs/2111.09886, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.simmim.keys import PixelHeadConfig
from vissl_zero.models.patches import Tokens
from vissl_zero.registry import HEADS


class PixelOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        pixels: (b, 3, H, W).
        mask: (b, h, w) bool, True where a patch was masked; None if none was.
    """

    embeddings: Tensor
    pixels: Tensor
    mask: Tensor | None


@HEADS.register("pixel_head", config=PixelHeadConfig)
class PixelHead(nn.Module):
    """A linear layer from a patch's token to its pixels.

    Args: the fields of ``PixelHeadConfig``.
    """

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        self.patch_size = math.isqrt(dims[-1] // 3)
        if len(dims) != 2 or 3 * self.patch_size**2 != dims[-1]:
            must = "must be the trunk's features and 3 times the pixels of a square patch"
            fix = "Write dims: [-1, 768] for patches of 16 pixels."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.pixel_head.dims", str(list(dims)), must, fix)])
        self.output = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> PixelOutput:
        """Pixels of images of one resolution."""
        (own,) = tokens
        patches = self.output(own.wanted()).unflatten(1, own.grid).unflatten(3, (3, self.patch_size, self.patch_size))
        # (b, h, w, 3, p, p) -> (b, 3, h * p, w * p)
        pixels = patches.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), 3, own.grid[0] * self.patch_size, -1)
        mask = None if own.view.masked is None else own.view.masked.unflatten(1, own.grid)
        return PixelOutput(features, pixels, mask)
