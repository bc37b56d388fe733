"""PIRL: its loss, its head, and the method as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.embedding import images_of, output_of
from vissl_zero.methods.jigsaw.method import SiameseConcatView, random_order, shuffled, tiles_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.npid.method import NPID, MemoryBank, info_nce_loss, nce_loss
from vissl_zero.methods.pirl.keys import PIRLHeadConfig, PIRLLossConfig
from vissl_zero.models.heads.mlp import MLP, Chain
from vissl_zero.registry import HEADS, LOSSES


def pirl_loss(
    image: Tensor,
    transformed: Tensor,
    sample_ids: Tensor,
    bank: MemoryBank,
    num_negatives: int,
    temperature: float = 0.07,
    weight: float = 0.5,
    use_info_nce: bool = False,
) -> Tensor:
    """Both an image and its transformed version are told apart from other images by the memory bank.

    Args:
        image, transformed: (n, D) embeddings of this rank's samples, whole and as patches; not normalised.
        sample_ids: (n,) index of each image in the data set; ``set_random_key`` was given the same.
        bank: of all images; update it with ``image`` afterwards.
        num_negatives: images each one is contrasted with.
        temperature: divides the cosine similarities.
        weight: of the transformed version; the image has the rest.
        use_info_nce: cross-entropy instead of noise-contrastive estimation.
    Returns:
        0-d, the mean over this rank's samples. Collective in the first call only.
    """
    total = image.new_zeros(())
    # Tiles first, as in VISSL: the first scores set the bank's Z.
    for share, embeddings, layer in ((weight, transformed, "transformed"), (1 - weight, image, "image")):
        negatives = bank.draw_negatives(len(embeddings), num_negatives, f"memory_bank.{layer}")
        similarities = bank.similarities(embeddings, sample_ids, negatives)
        term = info_nce_loss(similarities, temperature) if use_info_nce else nce_loss(similarities, bank, temperature)
        total = total + share * term
    return total


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

    def __init__(
        self, dims: Sequence[int], num_towers: int = 9, of_image: Sequence[Any] = (), of_tiles: Sequence[Any] = ()
    ):
        super().__init__()
        if bool(of_image) != bool(of_tiles):
            must, fix = "must have both of_image and of_tiles, or neither", "Add the other, or leave both out."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.pirl_head", "one of them", must, fix)])
        self.num_towers = num_towers
        ends = (dims[0], dims[-1])
        self.of_image = Chain(of_image, ends) if of_image else MLP(dims, use_relu=True)
        self.of_tile = nn.Identity() if of_tiles else MLP(dims, use_relu=True)
        # What puts tiles side by side is one of VISSL's heads, else of ours.
        self.side_by_side = nn.Identity() if of_tiles else SiameseConcatView(num_towers)
        self.of_tiles = Chain(of_tiles, ends) if of_tiles else nn.Linear(num_towers * dims[-1], dims[-1])

    def forward(self, features: Tensor) -> PIRLOutput:
        """Features of n images, then of the first tile of each, of the second, ...: ((1 + num_towers) * n, F)."""
        num_images = len(features) // (1 + self.num_towers)
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
        """The first crop, and the tiles of the second."""
        if self.are_cut:
            return super().run_student(model, batch)
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
