"""A memory bank of all images supplies the negatives: NPID and PIRL: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number, one_of
from vissl_zero.errors import Problem
from vissl_zero.methods.pretext_keys import GRIDS, towers_of, wrong_tiles, wrong_towers
from vissl_zero.methods.spec import MethodSpec, are_cut, crops_of, head_width, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run_config import RunConfig


LOSS_TYPES = ("nce", "cross_entropy")


@dataclass
class NegativesConfig:
    """``negative_sampling_params``: what an image is contrasted with."""

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
        """embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """One view, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "mlp"),
            *_one_view(cfg),
            *one_of(f"{path}.loss_type", keys.loss_type, LOSS_TYPES),
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
        """embedding_dim and num_towers from the head, are_cut from the transforms."""
        return {
            "embedding_dim": (head_width(cfg), "head"),
            "num_towers": (towers_of(cfg, 9), "head"),
            "are_cut": (are_cut(cfg), "transforms"),
        }

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, or one and tiles; a head that takes tiles."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "pirl_head"),
            *wrong_towers(cfg, GRIDS),
            *(wrong_tiles(cfg) if (crops_of(cfg) or [])[:-1] == [1] else two_views(cfg)),
            *one_of(f"{path}.loss_type", keys.loss_type, LOSS_TYPES),
        ]
