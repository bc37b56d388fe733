"""Pretext tasks: RotNet and Jigsaw, and with a memory bank of all images NPID and PIRL: keys and rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number, one_of
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import (
    MethodSpec,
    are_cut,
    crops_of,
    head_width,
    heads_of,
    loss_keys,
    one_head,
    one_size,
    two_views,
)
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions

NUM_ANGLES = 4


@dataclass
class RotNetLossConfig:
    """``rotnet_loss``: by which quarter turn was it rotated, https://arxiv.org/abs/1803.07728."""

    all_angles: bool = True
    """Every crop at all four angles, as published; false: at one, drawn anew in every step (VISSL)."""


@METHODS.register("rotnet")
class RotNetSpec(MethodSpec):
    """RotNet: predicts which of four rotations an image has."""

    losses = {"rotnet_loss": RotNetLossConfig}
    title = "RotNet"
    paper = "https://arxiv.org/abs/1803.07728"
    views = "1 or more square crops of one size, each at 4 angles, or at one"
    recipe = "digits/rotnet"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one size, a head with an output per angle."""
        return [*one_head(cfg, "mlp"), *one_size(cfg), *self._outputs(cfg)]

    def _outputs(self, cfg: RunConfig) -> list[Problem]:
        width = head_width(cfg)
        if width in (None, NUM_ANGLES):
            return []
        must = f"must end in {NUM_ANGLES} outputs for rotnet_loss, one per angle"
        return [Problem("config.MODEL.HEAD.PARAMS", str(width), must, f"Write dims: [..., {NUM_ANGLES}].")]


GRIDS = {4: 2, 9: 3}  # tiles -> of a side


@dataclass
class JigsawHeadConfig:
    """``jigsaw_head``: each tile through an MLP, then all tiles of an image side by side through a linear layer."""

    dims: list[int] = MISSING
    """Widths of the MLP, from the trunk's features."""
    num_towers: int = 9
    """Tiles of an image: 4 or 9."""
    num_permutations: int = number(1000, least=2)
    """Orders to tell apart; at most 24 with 4 tiles."""


@dataclass
class SiameseConcatViewConfig:
    """``siamese_concat_view``: the features of an image's tiles side by side, between the heads before and after."""

    num_towers: int = number(MISSING, least=1)
    """Tiles of an image."""


@dataclass
class JigsawLossConfig:
    """``jigsaw_loss``: in which order are the tiles, https://arxiv.org/abs/1603.09246."""

    num_towers: int | None = None
    """Tiles of an image; null: from the head, which also wins over a different number."""
    num_permutations: int | None = None
    """Orders to tell apart; null: from the head, which also wins over a different number."""
    perm_file: str = ""
    """File of the orders (.npy, a row each), such as VISSL's; empty: orders far from each other are chosen."""
    are_cut: bool | None = None
    """Whether crops are tiles already; null: from the transforms, which also win over a different value."""


@METHODS.register("jigsaw")
class JigsawSpec(MethodSpec):
    """Jigsaw: predicts the order of an image's shuffled tiles."""

    losses = {"jigsaw_loss": JigsawLossConfig}
    heads = {"jigsaw_head": JigsawHeadConfig, "siamese_concat_view": SiameseConcatViewConfig}
    title = "Jigsaw"
    paper = "https://arxiv.org/abs/1603.09246"
    views = "1 or more crops of one size, in 4 or 9 shuffled tiles; or tiles of one image"
    recipe = "digits/jigsaw"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer num_towers and num_permutations from the head, are_cut from the transforms."""
        name, head = next(heads_of(cfg), ("", {}))
        orders = head.get("num_permutations", 1000) if name == "jigsaw_head" else head_width(cfg)
        return {
            "num_towers": (_num_towers(cfg, 9), "head"),
            "num_permutations": (orders, "head"),
            "are_cut": (are_cut(cfg), "transforms"),
        }

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one size, a head of tiles, no more orders than exist, and a file of orders that exists."""
        return [
            *one_head(cfg, "jigsaw_head", *["mlp"] * (_num_towers(cfg, None) is not None)),
            *one_size(cfg),
            *_wrong_towers(cfg),
            *_wrong_tiles(cfg),
            *_joined_tiles(cfg),
            *self._orders(cfg),
            *self._file(cfg),
        ]

    def _file(self, cfg: RunConfig) -> list[Problem]:
        file = loss_keys(cfg).perm_file
        if not file or cfg.DRY_RUN or Path(file).expanduser().is_file():
            return []
        key = f"config.LOSS.{cfg.LOSS['name']}.perm_file"
        return [Problem(key, repr(file), "must name a file that exists", "Correct the path, or leave it out.")]

    def _orders(self, cfg: RunConfig) -> list[Problem]:
        values = {key: value for key, (value, _) in self.inferred(cfg).items()}
        tiles, orders = values["num_towers"], values["num_permutations"]
        if tiles not in GRIDS or not isinstance(orders, int) or orders <= math.factorial(tiles):
            return []
        must = f"num_permutations must be at most the {math.factorial(tiles)} orders of {tiles} tiles"
        return [Problem("config.MODEL.HEAD.PARAMS", str(orders), must, "Lower it.")]


def _num_towers(cfg: RunConfig, default: int | None) -> int | None:
    """Return ``num_towers`` of the first head or, in a chain, of its ``siamese_concat_view``."""
    name, head = next(heads_of(cfg), ("", {}))
    if name == "chain":
        parts = [keys for part, keys in head["heads"] if part == "siamese_concat_view"]
        head, default = parts[0] if parts else {}, None
    num_towers: int | None = head.get("num_towers", default) if head else None
    return num_towers


def _wrong_towers(cfg: RunConfig) -> list[Problem]:
    """Check that the head's number of tiles makes a square grid."""
    towers = _num_towers(cfg, 9)
    if towers is None or towers in GRIDS:
        return []
    must = f"num_towers must be {' or '.join(map(str, GRIDS))}"
    return [Problem("config.MODEL.HEAD.PARAMS", str(towers), must, "Write num_towers: 9.")]


def _wrong_tiles(cfg: RunConfig) -> list[Problem]:
    """Check that the transforms cut images into the tiles that the head takes."""
    towers, counts = _num_towers(cfg, 9), crops_of(cfg)
    if not are_cut(cfg) or towers is None or counts is None or counts[-1] == towers:
        return []
    must = f"must make the {towers} tiles that the head takes"
    return [Problem("config.DATA.TRAIN.TRANSFORMS", f"{counts[-1]} tiles", must, f"Write num_patches: {towers}.")]


def _joined_tiles(cfg: RunConfig) -> list[Problem]:
    """Check that all tiles of an image are in one forward pass: the head concatenates them."""
    number, name = cfg.TRAINER.CROP_PASSES, cfg.LOSS["name"]
    if number == 1:
        return []
    must = f"must be 1 for {name}, whose head needs all tiles of an image in one pass"
    return [Problem("config.TRAINER.CROP_PASSES", str(number), must, "Leave it out.")]


_LOSS_TYPES = ("nce", "cross_entropy")


@dataclass
class NegativesConfig:
    """``negative_sampling_params``: what an image is contrasted with."""

    # VISSL's number. The paper has 4,096.
    num_negatives: int = number(16000, least=1)
    """Images drawn from the memory for each image and step."""


@dataclass
class MemoryConfig:
    """``memory_params``: the memory of all images."""

    momentum: float = number(0.5, least=0, below=1)
    """Weight of what is remembered of an image when it is seen again."""


@dataclass
class NPIDLossConfig:
    """``nce_loss_with_memory``: instance discrimination against a memory bank, https://arxiv.org/abs/1805.01978."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    loss_type: str = "nce"
    """nce (noise-contrastive estimation) or cross_entropy (InfoNCE, NPID++)."""
    temperature: float = number(0.07, least=1e-4)
    """Divides the cosine similarities."""
    negative_sampling_params: NegativesConfig = field(default_factory=NegativesConfig)
    """Images to contrast with."""
    memory_params: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory: an embedding of every training image on every process."""


@METHODS.register("npid")
class NPIDSpec(MethodSpec):
    """NPID: each image is a class of its own; a memory bank of all images supplies the negatives."""

    losses = {"nce_loss_with_memory": NPIDLossConfig}
    shape_keys = ("embedding_dim",)
    title = "NPID"
    paper = "https://arxiv.org/abs/1805.01978"
    views = "1 crop"
    couples = "negatives: a memory of all images"
    recipe = "digits/npid"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one view, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "mlp"),
            *_one_view(cfg),
            *one_of(f"{path}.loss_type", keys.loss_type, _LOSS_TYPES),
        ]


def _one_view(cfg: RunConfig) -> list[Problem]:
    counts = crops_of(cfg)
    if counts is None or counts == [1]:
        return []
    must = f"must make one crop of an image for {cfg.LOSS['name']}"
    return [Problem("config.DATA.TRAIN.TRANSFORMS", str(counts), must, "Write total_num_crops: 1, num_crops: [1].")]


@dataclass
class PIRLHeadConfig:
    """``pirl_head``: one projection of whole images, and one of the tiles of an image, in any order."""

    dims: list[int] = MISSING
    """Widths of both projections, from the trunk's features to the embedding; with ``of_image`` the first and last."""
    num_towers: int = 9
    """Tiles of an image: 4 or 9. Their projections stand side by side before the last layer."""
    of_image: list[Any] = field(default_factory=list)
    """Heads of whole images, each ["name", {key: value}], one after another; empty: an MLP."""
    of_tiles: list[Any] = field(default_factory=list)
    """Heads of tiles, siamese_concat_view among them; given together with ``of_image``."""


@dataclass
class PIRLLossConfig(NPIDLossConfig):
    """``pirl_loss``: an image and its shuffled tiles against a memory bank, https://arxiv.org/abs/1912.01991."""

    tile_weight: float = number(0.5, least=0, most=1)
    """Weight of the tiles; the whole image has the rest."""
    num_towers: int | None = None
    """Tiles of an image; null: from the head, which also wins over a different number."""
    are_cut: bool | None = None
    """Whether crops are an image and its tiles; null: from the transforms, which also win over a different value."""


@METHODS.register("pirl")
class PIRLSpec(MethodSpec):
    """PIRL: an image and its shuffled tiles share an embedding; a memory bank supplies the negatives."""

    losses = {"pirl_loss": PIRLLossConfig}
    heads = {"pirl_head": PIRLHeadConfig}
    shape_keys = ("embedding_dim",)
    title = "PIRL"
    paper = "https://arxiv.org/abs/1912.01991"
    views = "2 crops: one whole, one in shuffled tiles; or a crop and tiles"
    couples = "negatives: a memory of all images"
    recipe = "digits/pirl"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer embedding_dim and num_towers from the head, are_cut from the transforms."""
        return {
            "embedding_dim": (head_width(cfg), "head"),
            "num_towers": (_num_towers(cfg, 9), "head"),
            "are_cut": (are_cut(cfg), "transforms"),
        }

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, or one view and tiles, and for a head of tiles."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "pirl_head"),
            *_wrong_towers(cfg),
            *(_wrong_tiles(cfg) if (crops_of(cfg) or [])[:-1] == [1] else two_views(cfg)),
            *_joined_tiles(cfg),
            *one_of(f"{path}.loss_type", keys.loss_type, _LOSS_TYPES),
        ]
