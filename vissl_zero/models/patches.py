"""Patches of images between a method, a vision transformer and its heads: which are hidden, seen and asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PatchView(NamedTuple):
    """What a pass does with the patches of the images of one resolution; tuples, so that hooks see the tensors.

    As many patches for every image, so that shapes do not depend on what was drawn.

    Attributes:
        masked: (b, P) bool, patches that the mask token stands for; None: none.
        kept: (b, k) int64, the patches that are seen, the others being left out; None: all.
        wanted: (b, ..., m) int64, the patches that heads are asked for; None: all.
        last_blocks: how many of the trunk's last blocks heads are given the tokens of, too.
    """

    masked: Tensor | None = None
    kept: Tensor | None = None
    wanted: Tensor | None = None
    last_blocks: int = 0


# From the image tensors of all resolutions and a patch's (height, width) to a view of each.
SeePatches = Callable[[Sequence[Tensor], tuple[int, int]], list[PatchView]]


class Tokens(NamedTuple):
    """What a head whose ``forward`` has a parameter ``tokens`` is given of each resolution.

    Attributes:
        rows: (b, num_prefix + patches seen, D) after the trunk's last norm.
        num_prefix: class and register tokens, which come first.
        grid: patches per column and per row, h and w.
        view: how they were seen.
        blocks: the shape of ``rows``, of the last blocks in their order, before the trunk's last norm.
    """

    rows: Tensor
    num_prefix: int
    grid: tuple[int, int]
    view: PatchView
    blocks: tuple[Tensor, ...] = ()

    def wanted(self) -> Tensor:
        """(b, ..., m, D) of the patches asked for, of which none may have been left out."""
        patches = self.rows[:, self.num_prefix :]
        return patches if self.view.wanted is None else taken(patches, self.view.wanted)


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (b, n, D) at positions (b, ..., m) of each image: (b, ..., m, D)."""
    flat = index.flatten(1)
    return rows.gather(1, flat[:, :, None].expand(-1, -1, rows.shape[2])).unflatten(1, index.shape[1:])


def grid_of(images: Tensor, patch_size: tuple[int, int]) -> tuple[int, int]:
    """Patches per column and per row of images (b, 3, H, W)."""
    return images.shape[2] // patch_size[0], images.shape[3] // patch_size[1]


def sine_positions(grid: tuple[int, int], dim: int, like: Tensor) -> Tensor:
    """Fixed position embeddings (h * w, dim): sines and cosines of row and column (https://arxiv.org/abs/2111.06377).

    Args:
        grid: h and w.
        dim: a multiple of 4.
        like: gives device and dtype.
    """
    rates = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64, device=like.device) / (dim / 4))
    rows, columns = (torch.arange(side, dtype=torch.float64, device=like.device)[:, None] * rates for side in grid)
    angles = torch.stack([rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)], dim=2)
    return torch.cat([angles.sin(), angles.cos()], dim=3).flatten(2).flatten(0, 1).to(like.dtype)
