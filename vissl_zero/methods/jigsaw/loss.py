"""Shuffled tiles of an image: Jigsaw (https://arxiv.org/abs/1603.09246), and PIRL's transformation."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vissl_zero.methods.jigsaw.keys import GRIDS
from vissl_zero.models.keyed_random import keyed_bits


def tiles_of(images: Tensor, num_tiles: int) -> Tensor:
    """Images (m, C, H, W) cut into a square grid, row by row: (num_tiles, m, C, H // g, W // g).

    What is left over at the right and at the bottom is left out.

    Args:
        num_tiles: g * g, 4 or 9.
    """
    grid = GRIDS[num_tiles]
    height, width = images.shape[2] // grid, images.shape[3] // grid
    cut = images[:, :, : grid * height, : grid * width].unflatten(3, (grid, width)).unflatten(2, (grid, height))
    return cut.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


def shuffled(tiles: Tensor, orders: Tensor) -> Tensor:
    """Tiles in another order for each image.

    Args:
        tiles: (T, m, ...).
        orders: (m, T) int64: place t of image j gets its tile ``orders[j, t]``.
    Returns:
        (T, m, ...).
    """
    return tiles[orders.T, torch.arange(tiles.shape[1], device=tiles.device)]


def random_order(num_rows: int, num_tiles: int, layer: str, device: torch.device) -> Tensor:
    """An order of tiles for each row, (num_rows, num_tiles), keyed as ``keyed_bits`` is."""
    return keyed_bits(num_rows, num_tiles, layer, device).argsort(dim=1, stable=True)


@cache
def permutations(num_tiles: int, count: int) -> Tensor:
    """Orders that are far from each other: each has the largest mean Hamming distance to those before it.

    Args:
        num_tiles: T, at most 9.
        count: at most T!.
    Returns:
        (count, T) int64; the same everywhere.
    Cost: T! * count comparisons of orders, once.
    """
    # numpy: a dry run makes tensors without values.
    candidates = np.array(list(itertools.permutations(range(num_tiles))))
    distances = np.zeros(len(candidates), dtype=np.int64)
    chosen = [0]
    while len(chosen) < count:
        distances += (candidates != candidates[chosen[-1]]).sum(axis=1)
        distances[chosen[-1]] = -(num_tiles + 1) * count  # never again
        chosen.append(int(distances.argmax()))
    return torch.from_numpy(candidates[chosen])
