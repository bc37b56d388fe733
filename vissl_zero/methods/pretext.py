"""Pretext tasks, classification by labels that the method makes itself: RotNet and Jigsaw. Losses and heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch, Method
from vissl_zero.methods.pretext_keys import (
    GRIDS,
    NUM_ANGLES,
    JigsawHeadConfig,
    JigsawLossConfig,
    RotNetLossConfig,
    SiameseConcatViewConfig,
)
from vissl_zero.models.heads.mlp import MLP
from vissl_zero.models.keyed_random import keyed_bits
from vissl_zero.registry import HEADS, LOSSES


class PretextTask(Method):
    """Base of methods that guess what was done to an image; define ``labels``, and ``run_student``, which does it.

    Args:
        num_classes: what may have been done.
    """

    couples_samples = False

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.guessing_loss = math.log(num_classes)
        self._counts: Tensor | None = None

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """(num_rows,) int64: what was done to each row of the outputs."""
        raise NotImplementedError

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Cross-entropy, the mean over this rank's samples. No communication.

        Raises:
            ConfigError: the head has other outputs than there are classes.
        """
        logits: Tensor = at_least_float32(outputs[0])
        if logits.shape[1] != self.num_classes:
            must = f"must end in {self.num_classes} outputs"
            got = f"{logits.shape[1]} outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", got, must, "Correct the last width.")])
        labels = self.labels(batch, len(logits), logits.device)
        right = (logits.detach().argmax(dim=1) == labels).sum()
        self._counts = torch.stack((right.new_tensor(len(logits)), right))
        return F.cross_entropy(logits, labels, reduction="sum") / max(len(logits), 1)

    def health_sums(self) -> Tensor:
        """Rows of the last micro-batch, and those that are guessed right."""
        return super().health_sums() if self._counts is None else self._counts

    def health(self, sums: Tensor) -> dict[str, float]:
        """``pretext_top1``: share of rows whose class is guessed right."""
        if self._counts is None:
            return {}
        num_rows, right = sums.tolist()
        return {"pretext_top1": right / max(num_rows, 1)}


@LOSSES.register("rotnet_loss", config=RotNetLossConfig)
class RotNet(PretextTask):
    """RotNet: predicts which of four rotations an image has.

    Args: the fields of ``RotNetLossConfig``.
    """

    def __init__(self, all_angles: bool = True) -> None:
        super().__init__(NUM_ANGLES)
        self.all_angles = all_angles

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Every crop at 0, 90, 180 and 270 degrees, or at one of them: rows by angle, then by crop, then by sample.

        Raises:
            ConfigError: images are not square.
        """
        (images,) = batch.images
        if images.shape[2] != images.shape[3]:
            got = f"{images.shape[2]} x {images.shape[3]} pixels"
            fix = "Crop images to a square: {name: CenterCrop, size: 224}."
            raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", got, "must make square images", fix)])
        turned = torch.stack([torch.rot90(images, turns, (2, 3)) for turns in range(NUM_ANGLES)])
        rows = torch.arange(len(images), device=images.device)
        one_of_each = (self.labels(batch, len(images), images.device), rows)
        outputs: list[Any] = model([turned.flatten(0, 1) if self.all_angles else turned[one_of_each]])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Quarter turns; see ``PretextTask``."""
        if not self.all_angles:
            return keyed_bits(num_rows, 1, "rotnet", device)[:, 0] % NUM_ANGLES
        return torch.arange(NUM_ANGLES, device=device).repeat_interleave(num_rows // NUM_ANGLES)


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
    candidates = np.array(list(itertools.permutations(range(num_tiles))), dtype=np.int8)
    distances = np.zeros(len(candidates), dtype=np.int64)
    chosen = [0]
    while len(chosen) < count:
        distances += (candidates != candidates[chosen[-1]]).sum(axis=1)
        distances[chosen[-1]] = -(num_tiles + 1) * count  # never again
        chosen.append(int(distances.argmax()))
    return torch.from_numpy(candidates[chosen].astype(np.int64))


def permutations_of(file: str, num_tiles: int, count: int) -> Tensor:
    """Orders from a .npy file, a row each, counted from 0 or from 1 (VISSL's): (count, T) int64.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        orders = np.load(Path(file).expanduser(), allow_pickle=False).astype(np.int64)
        orders = orders - orders.min()
        is_right = orders.shape == (count, num_tiles) and (np.sort(orders) == np.arange(num_tiles)).all()
    except (OSError, ValueError, TypeError):
        is_right = False
    if not is_right:
        must = f"must hold {count} orders of {num_tiles} tiles, a row each"
        fix = "Correct the file, or the last width of the head, which is the number of orders."
        raise ConfigError([Problem("config.LOSS.jigsaw_loss.perm_file", repr(file), must, fix)])
    return torch.from_numpy(orders)


@HEADS.register("siamese_concat_view", config=SiameseConcatViewConfig)
class SiameseConcatView(nn.Module):
    """The features of an image's tiles side by side.

    Args: the fields of ``SiameseConcatViewConfig``.
    """

    def __init__(self, num_towers: int):
        super().__init__()
        self.num_towers = num_towers

    def forward(self, features: Tensor) -> Tensor:
        """Features of the first tile of m images, of the second, ... (num_towers * m, F) -> (m, num_towers * F)."""
        tiles = features.flatten(1).unflatten(0, (self.num_towers, len(features) // self.num_towers))
        return tiles.transpose(0, 1).flatten(1)


@HEADS.register("jigsaw_head", config=JigsawHeadConfig)
class JigsawHead(nn.Module):
    """An MLP for each tile, then a linear layer for all tiles of an image side by side.

    Args: the fields of ``JigsawHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], num_towers: int = 9, num_permutations: int = 1000):
        super().__init__()
        self.of_tile = MLP(dims, use_relu=True, skip_last_layer_relu_bn=False)
        self.side_by_side = SiameseConcatView(num_towers)
        self.of_tiles = nn.Linear(num_towers * dims[-1], num_permutations)

    def forward(self, features: Tensor) -> Tensor:
        """Features of the first tile of m images, of the second, ... (num_towers * m, F) -> (m, num_permutations)."""
        logits: Tensor = self.of_tiles(self.side_by_side(self.of_tile(features)))
        return logits


@LOSSES.register("jigsaw_loss", config=JigsawLossConfig)
class Jigsaw(PretextTask):
    """Jigsaw: in which order the tiles of an image were put; one of a set is drawn for every sample, crop and step.

    Args: the fields of ``JigsawLossConfig``, known.
    """

    orders: Tensor

    def __init__(self, num_towers: int, num_permutations: int, perm_file: str = "", are_cut: bool = False):
        super().__init__(num_permutations)
        self.num_towers = num_towers
        self.are_cut = are_cut
        orders = permutations_of(perm_file, num_towers, num_permutations) if perm_file else None
        orders = permutations(num_towers, num_permutations) if orders is None else orders
        self.register_buffer("orders", orders, persistent=False)  # a constant: it is not saved

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The tiles of every crop, rows by place, then by crop, then by sample."""
        (images,) = batch.images
        num_tiles = self.num_towers
        tiles = images.unflatten(0, (num_tiles, -1)) if self.are_cut else tiles_of(images, num_tiles)
        orders = self.orders[self.labels(batch, tiles.shape[1], images.device)]
        outputs: list[Any] = model([shuffled(tiles, orders).flatten(0, 1)])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Numbers of the orders; see ``PretextTask``."""
        return keyed_bits(num_rows, 1, "jigsaw", device)[:, 0] % self.num_classes
