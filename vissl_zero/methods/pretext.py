"""Pretext tasks, whose labels the method makes: losses, heads and methods.

RotNet predicts a rotation and Jigsaw an order of tiles. NPID and PIRL discriminate an image from all others, with
negatives from a memory bank of all images; PIRL also discriminates Jigsaw's tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch, EmbeddingMethod, GuessingMethod, crops_of, images_of, output_of
from vissl_zero.methods.pretext_keys import (
    GRIDS,
    NUM_ANGLES,
    JigsawHeadConfig,
    JigsawLossConfig,
    NPIDLossConfig,
    PIRLHeadConfig,
    PIRLLossConfig,
    RotNetLossConfig,
    SiameseConcatViewConfig,
)
from vissl_zero.models.keyed_random import keyed_bits
from vissl_zero.models.mlp_heads import MLP, Chain
from vissl_zero.registry import HEADS, LOSSES


class PretextTask(GuessingMethod):
    """Base of methods that predict which transformation an image had.

    A subclass defines ``labels``, and ``run_student``, which transforms the images.

    Args:
        num_classes: number of transformations.
    """

    couples_samples = False
    share_name = "pretext_top1"

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.guessing_loss = math.log(num_classes)

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Return (num_rows,) int64, the transformation of each row of the outputs."""
        raise NotImplementedError

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the cross-entropy, the mean over this rank's samples. No communication.

        Raises:
            ConfigError: the head has not one output per class.
        """
        logits: Tensor = at_least_float32(outputs[0])
        if logits.shape[1] != self.num_classes:
            must = f"must end in {self.num_classes} outputs"
            got = f"{logits.shape[1]} outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", got, must, "Correct the last width.")])
        labels = self.labels(batch, len(logits), logits.device)
        right = (logits.detach().argmax(dim=1) == labels).sum()
        self._note_guesses(right.new_tensor(len(logits)), right)
        return F.cross_entropy(logits, labels, reduction="sum") / max(len(logits), 1)


@LOSSES.register("rotnet_loss", config=RotNetLossConfig)
class RotNet(PretextTask):
    """RotNet: predicts which of four rotations an image has.

    Args: the fields of ``RotNetLossConfig``.
    """

    def __init__(self, all_angles: bool = True) -> None:
        super().__init__(NUM_ANGLES)
        self.all_angles = all_angles

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on every crop at 0, 90, 180 and 270 degrees, or at one: rows by angle, crop, sample.

        Raises:
            ConfigError: images are not square.
        """
        (images,) = batch.images
        # A quarter turn of another rectangle has another shape, and would give the angle away.
        if images.shape[2] != images.shape[3]:
            got = f"{images.shape[2]} x {images.shape[3]} pixels"
            fix = "Crop images to a square: {name: CenterCrop, size: 224}."
            raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", got, "must make square images", fix)])
        # On the batch and not in the loader: the student sees every crop at all angles, which are loaded once.
        turned = torch.stack([torch.rot90(images, turns, (2, 3)) for turns in range(NUM_ANGLES)])
        rows = torch.arange(len(images), device=images.device)
        drawn = (self.labels(batch, len(images), images.device), rows)
        outputs: list[Any] = model([turned.flatten(0, 1) if self.all_angles else turned[drawn]])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Return the number of quarter turns of each row; see ``PretextTask``."""
        if not self.all_angles:
            # Keyed by (seed, step, sample): run_student and the loss draw the same angles.
            return keyed_bits(num_rows, 1, "rotnet", device)[:, 0] % NUM_ANGLES
        return torch.arange(NUM_ANGLES, device=device).repeat_interleave(num_rows // NUM_ANGLES)


def tiles_of(images: Tensor, num_tiles: int) -> Tensor:
    """Cut images (m, C, H, W) into a square grid, row by row: (num_tiles, m, C, H // g, W // g).

    Pixels at the right and bottom that do not fill a tile are dropped.

    Args:
        num_tiles: g * g, 4 or 9.
    """
    grid = GRIDS[num_tiles]
    height, width = images.shape[2] // grid, images.shape[3] // grid
    cut = images[:, :, : grid * height, : grid * width].unflatten(3, (grid, width)).unflatten(2, (grid, height))
    return cut.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


def shuffled(tiles: Tensor, orders: Tensor) -> Tensor:
    """Reorder the tiles of each image.

    Args:
        tiles: (T, m, ...).
        orders: (m, T) int64: position t of image j gets the image's tile ``orders[j, t]``.
    Returns:
        (T, m, ...).
    """
    return tiles[orders.T, torch.arange(tiles.shape[1], device=tiles.device)]


def random_order(num_rows: int, num_tiles: int, layer: str, device: torch.device) -> Tensor:
    """Draw an order of tiles for each row, (num_rows, num_tiles); see ``keyed_bits`` for the key."""
    return keyed_bits(num_rows, num_tiles, layer, device).argsort(dim=1, stable=True)


@cache
def permutations(num_tiles: int, count: int) -> Tensor:
    """Select orders greedily: each has the largest mean Hamming distance to the orders selected before.

    Args:
        num_tiles: T, at most 9.
        count: number of orders, at most T!.
    Returns:
        (count, T) int64, a constant.
    Cost: T! * count comparisons of orders, once.
    """
    # numpy, because a dry run makes torch tensors without values.
    candidates = np.array(list(itertools.permutations(range(num_tiles))), dtype=np.int8)
    distances = np.zeros(len(candidates), dtype=np.int64)
    chosen = [0]
    while len(chosen) < count:
        distances += (candidates != candidates[chosen[-1]]).sum(axis=1)
        distances[chosen[-1]] = -(num_tiles + 1) * count  # below any sum of distances: not selected again
        chosen.append(int(distances.argmax()))
    return torch.from_numpy(candidates[chosen].astype(np.int64))


def permutations_of(file: str, num_tiles: int, count: int) -> Tensor:
    """Load orders of tiles (count, T) int64 from a .npy file, one per row; tiles count from 0, or from 1 as in VISSL.

    Raises:
        ConfigError: the file cannot be read, or does not have ``count`` orders of ``num_tiles`` tiles.
    """
    # By default NumPy refuses pickles, so a file of orders runs no code.
    try:
        orders = np.load(Path(file).expanduser()).astype(np.int64)
        # VISSL's files count tiles from 1.
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
    """A head that concatenates the features of an image's tiles.

    Args: the fields of ``SiameseConcatViewConfig``.
    """

    def __init__(self, num_towers: int):
        super().__init__()
        self.num_towers = num_towers

    def forward(self, features: Tensor) -> Tensor:
        """Concatenate features by image: (num_towers * m, F), ordered by tile -> (m, num_towers * F)."""
        tiles = features.flatten(1).unflatten(0, (self.num_towers, len(features) // self.num_towers))
        return tiles.transpose(0, 1).flatten(1)


@HEADS.register("jigsaw_head", config=JigsawHeadConfig)
class JigsawHead(nn.Module):
    """An MLP for each tile, then a linear layer for the concatenated tiles of an image.

    Args: the fields of ``JigsawHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], num_towers: int = 9, num_permutations: int = 1000):
        super().__init__()
        self.of_tile = MLP(dims, use_relu=True, skip_last_layer_relu_bn=False)
        self.side_by_side = SiameseConcatView(num_towers)
        self.of_tiles = nn.Linear(num_towers * dims[-1], num_permutations)

    def forward(self, features: Tensor) -> Tensor:
        """Score orders: features (num_towers * m, F), ordered by tile -> (m, num_permutations)."""
        logits: Tensor = self.of_tiles(self.side_by_side(self.of_tile(features)))
        return logits


@LOSSES.register("jigsaw_loss", config=JigsawLossConfig)
class Jigsaw(PretextTask):
    """Jigsaw: predicts the order of an image's tiles; an order of a fixed set is drawn for every sample, crop and step.

    Args: the fields of ``JigsawLossConfig``, known.
    """

    orders: Tensor

    def __init__(self, num_towers: int, num_permutations: int, perm_file: str = "", are_cut: bool = False):
        super().__init__(num_permutations)
        self.num_towers = num_towers
        self.are_cut = are_cut
        orders = permutations_of(perm_file, num_towers, num_permutations) if perm_file else None
        orders = permutations(num_towers, num_permutations) if orders is None else orders
        self.register_buffer("orders", orders, persistent=False)  # a constant, which checkpoints need not have

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on the tiles of every crop; rows are ordered by position, crop, sample."""
        (images,) = batch.images
        num_tiles = self.num_towers
        tiles = images.unflatten(0, (num_tiles, -1)) if self.are_cut else tiles_of(images, num_tiles)
        orders = self.orders[self.labels(batch, tiles.shape[1], images.device)]
        outputs: list[Any] = model([shuffled(tiles, orders).flatten(0, 1)])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Return the index of each row's order; see ``PretextTask``."""
        return keyed_bits(num_rows, 1, "jigsaw", device)[:, 0] % self.num_classes


# VISSL adds float32's epsilon to the denominators, in every number format.
_EPS = torch.finfo(torch.float32).eps


class MemoryBank(nn.Module):
    """One embedding for each image of the data set, identical on every rank.

    Args:
        num_images: S, of the data set.
        embedding_dim: D.
        momentum: weight of an image's old embedding.

    Attributes:
        memory: buffer (S, D), unit rows. It takes S * D numbers on every rank.
        normalizer: buffer, 0-d: the constant Z of the paper.
        has_normalizer: whether the first batch has set the normalizer.
    """

    memory: Tensor
    normalizer: Tensor

    def __init__(self, num_images: int, embedding_dim: int, momentum: float):
        super().__init__()
        self.momentum = momentum
        # As in NPID's NCEAverage.py.
        bound = 1 / math.sqrt(embedding_dim / 3)
        generator = torch.Generator().manual_seed(0)  # one seed on every rank
        first = torch.empty(num_images, embedding_dim).uniform_(-bound, bound, generator=generator)
        self.register_buffer("memory", F.normalize(first))
        # -1 until the first batch, as in NPID's code, so that a forgotten estimate shows.
        self.register_buffer("normalizer", torch.tensor(-1.0))
        # On the host: reading a buffer in every step would wait for the device.
        self.has_normalizer = False

    def get_extra_state(self) -> Tensor:
        """Return ``has_normalizer``, for ``state_dict``."""
        return torch.tensor(self.has_normalizer)

    def set_extra_state(self, state: Tensor) -> None:
        """Set ``has_normalizer``, from ``load_state_dict``."""
        self.has_normalizer = bool(state)

    def draw_negatives(self, num_samples: int, num_negatives: int, layer: str = "memory_bank") -> Tensor:
        """Draw negatives for each sample, keyed by (seed, step, sample): the same on any number of ranks.

        Args:
            num_samples: n, the samples of ``set_random_key``.
            num_negatives: M.
            layer: part of the key.
        Returns:
            (n, M) int64 indices into the memory, with replacement.
        """
        return keyed_bits(num_samples, num_negatives, layer, self.memory.device) % len(self.memory)

    def similarities(self, embeddings: Tensor, sample_ids: Tensor, negatives: Tensor) -> Tensor:
        """Compute the cosine similarity to the stored embeddings of the image itself, then of its negatives.

        Args:
            embeddings: (n, D); not normalized.
            sample_ids: (n,) index of each image in the data set.
            negatives: (n, M) indices.
        Returns:
            (n, 1 + M).
        """
        rows = F.normalize(at_least_float32(embeddings))
        stored = self.memory[torch.cat((sample_ids[:, None], negatives), dim=1)].to(rows.dtype)
        return torch.einsum("nd,nmd->nm", rows, stored)

    @torch.no_grad()
    def update(self, embeddings: Tensor, sample_ids: Tensor) -> None:
        """Move the stored embeddings of the images of all ranks towards the new ones. Collective.

        Args:
            embeddings: (n, D) of this rank; not normalized. Rows that are not finite are skipped.
            sample_ids: (n,), different from each other over all ranks.
        Cost: two gathers of rows (see ``collectives.all_gather_rows``).
        """
        rows = F.normalize(at_least_float32(embeddings)).to(self.memory.dtype)
        rows, indices = collectives.all_gather_rows(rows), collectives.all_gather_rows(sample_ids)
        before = self.memory[indices]
        after = F.normalize(before * self.momentum + rows * (1 - self.momentum))
        # torch.where, because indexing with a mask would wait for the device.
        self.memory[indices] = torch.where(rows.isfinite().all(dim=1, keepdim=True), after, before)


def nce_loss(similarities: Tensor, bank: MemoryBank, temperature: float) -> Tensor:
    """Compute NPID's noise-contrastive estimation (arXiv 1805.01978, equation 7). The first call sets Z.

    Args:
        similarities: (n, 1 + M), see ``MemoryBank.similarities``.
        bank: bank with Z.
        temperature: divides the similarities.
    Returns:
        0-d, the mean over this rank's samples. Collective in the first call only.
    """
    scores = torch.exp(similarities / temperature)
    num_images, num_negatives = len(bank.memory), scores.shape[1] - 1
    if not bank.has_normalizer:
        _set_normalizer(bank, scores.detach())
    probabilities = scores / bank.normalizer
    noise = num_negatives / num_images
    from_data = torch.log(probabilities[:, 0] / (probabilities[:, 0] + noise + _EPS))
    from_noise = torch.log(noise / (probabilities[:, 1:] + noise + _EPS))
    return -(from_data.sum() + from_noise.sum()) / max(len(scores), 1)


def info_nce_loss(similarities: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of identifying the image among itself and its negatives (NPID++).

    Args:
        similarities: (n, 1 + M), see ``MemoryBank.similarities``.
        temperature: divides the similarities.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    logits = similarities / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).sum() / max(len(logits), 1)


@torch.no_grad()
def _set_normalizer(bank: MemoryBank, scores: Tensor) -> None:
    """Set Z to the mean score of the first batch of all ranks, times the number of images. Collective."""
    # NPID estimates Z once from the first batch, and keeps it: the sum over all images would cost a pass in every step.
    sums = collectives.all_reduce_sum(torch.stack((scores.sum(), scores.new_tensor(scores.numel()))))
    bank.normalizer.copy_(sums[0] / sums[1] * len(bank.memory))
    bank.has_normalizer = True


@LOSSES.register("nce_loss_with_memory", config=NPIDLossConfig)
class NPID(EmbeddingMethod):
    """NPID: each image is a class of its own; a memory bank of all images supplies the negatives.

    Args: the fields of ``NPIDLossConfig``, with embedding_dim known.
    """

    remembers_images = True
    bank: MemoryBank

    def __init__(
        self,
        embedding_dim: int,
        loss_type: str = "nce",
        temperature: float = 0.07,
        negative_sampling_params: Mapping[str, int] | None = None,
        memory_params: Mapping[str, float] | None = None,
    ):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.loss_type = loss_type
        self.temperature = temperature
        self.num_negatives = (negative_sampling_params or {}).get("num_negatives", 16000)
        self.memory_momentum = (memory_params or {}).get("momentum", 0.5)

    def set_images(self, num_images: int) -> None:
        """Make a memory bank with a random embedding for each image."""
        self.bank = MemoryBank(num_images, self.embedding_dim, self.memory_momentum)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``nce_loss``. Only the first call is collective."""
        (embeddings,) = crops_of(outputs[0], 1, batch)
        self._note(embeddings)
        negatives = self.bank.draw_negatives(len(embeddings), self.num_negatives)
        similarities = self.bank.similarities(embeddings, batch.sample_ids, negatives)
        if self.loss_type == "nce":
            return nce_loss(similarities, self.bank, self.temperature)
        return info_nce_loss(similarities, self.temperature)

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the images' embeddings (n, D) and indices (n,)."""
        return outputs[0].detach(), batch.sample_ids

    def update_state(self, observed: Sequence[Any]) -> None:
        """Store the embeddings. Collective."""
        embeddings, sample_ids = (torch.cat(column) for column in zip(*observed, strict=True))
        self.bank.update(embeddings, sample_ids)


def pirl_loss(
    image: Tensor,
    transformed: Tensor,
    sample_ids: Tensor,
    bank: MemoryBank,
    num_negatives: int,
    temperature: float,
    weight: float,
    use_info_nce: bool,
) -> Tensor:
    """Compute the contrastive loss of an image and of its transformed version against the memory bank.

    Args:
        image, transformed: (n, D) embeddings of this rank's samples, whole and as tiles; not normalized.
        sample_ids: (n,) index of each image in the data set, the samples of ``set_random_key``.
        bank: bank of all images; update it with ``image`` afterward.
        num_negatives: number of negatives of each image.
        temperature: divides the cosine similarities.
        weight: weight of the transformed version; the image has 1 - weight.
        use_info_nce: cross-entropy instead of noise-contrastive estimation.
    Returns:
        0-d, the mean over this rank's samples. Collective in the first call only.
    """
    total = image.new_zeros(())
    # Tiles first, as in VISSL's nce_loss.py: the first scores set the bank's Z.
    for share, embeddings, layer in ((weight, transformed, "transformed"), (1 - weight, image, "image")):
        negatives = bank.draw_negatives(len(embeddings), num_negatives, f"memory_bank.{layer}")
        similarities = bank.similarities(embeddings, sample_ids, negatives)
        term = info_nce_loss(similarities, temperature) if use_info_nce else nce_loss(similarities, bank, temperature)
        total = total + share * term
    return total


class PIRLOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        images: (n, D) embeddings of whole images.
        tiles: (n, D) embeddings of their tiles together.
    """

    images: Tensor
    tiles: Tensor


@HEADS.register("pirl_head", config=PIRLHeadConfig)
class PIRLHead(nn.Module):
    """Two projections: of whole images, and of tiles, projected one by one and then concatenated.

    Args: the fields of ``PIRLHeadConfig``.
    """

    def __init__(
        self, dims: Sequence[int], num_towers: int = 9, of_image: Sequence[Any] = (), of_tiles: Sequence[Any] = ()
    ):
        super().__init__()
        if bool(of_image) != bool(of_tiles):
            must, fix = (
                "must have both of_image and of_tiles in pirl_head, or neither",
                "Add the other or leave both out.",
            )
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", "one of them", must, fix)])
        self.num_towers = num_towers
        ends = (dims[0], dims[-1])
        self.of_image = Chain(of_image, ends) if of_image else MLP(dims, use_relu=True)
        self.of_tile = nn.Identity() if of_tiles else MLP(dims, use_relu=True)
        # Heads written in the recipe (VISSL's) concatenate the tiles themselves.
        self.side_by_side = nn.Identity() if of_tiles else SiameseConcatView(num_towers)
        self.of_tiles = Chain(of_tiles, ends) if of_tiles else nn.Linear(num_towers * dims[-1], dims[-1])

    def forward(self, features: Tensor) -> PIRLOutput:
        """Project features ((1 + num_towers) * n, F): n images first, then their tiles, ordered by tile."""
        num_images = len(features) // (1 + self.num_towers)
        # Each tile is projected to a small width before all are joined: nine full features side by side would be too
        # wide.
        tiles = self.of_tiles(self.side_by_side(self.of_tile(features[num_images:])))
        return PIRLOutput(self.of_image(features[:num_images]), tiles)


@LOSSES.register("pirl_loss", config=PIRLLossConfig)
class PIRL(NPID):
    """PIRL: an image and its shuffled tiles share an embedding; a memory bank supplies the negatives.

    The first crop is seen whole, the second in tiles, in an order drawn for every sample and step; or the transforms
    make a crop and tiles.

    Args: the fields of ``PIRLLossConfig``, with embedding_dim and num_towers known.
    """

    def __init__(self, num_towers: int, tile_weight: float = 0.5, are_cut: bool = False, **keys: Any):
        super().__init__(**keys)
        self.num_towers = num_towers
        self.are_cut = are_cut
        self.tile_weight = tile_weight

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on the first crop, and the tiles of the second."""
        if self.are_cut:
            return super().run_student(model, batch)
        (whole,), (other,) = images_of(batch, [0]), images_of(batch, [1])
        order = random_order(len(other), self.num_towers, "pirl", other.device)
        outputs: list[Any] = model([whole, shuffled(tiles_of(other, self.num_towers), order).flatten(0, 1)])
        return outputs

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``pirl_loss``. Only the first call is collective."""
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

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the whole images' embeddings (n, D) and indices (n,)."""
        return outputs[0].images.detach(), batch.sample_ids
