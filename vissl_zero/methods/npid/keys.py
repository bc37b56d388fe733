"""NPID's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import number
from vissl_zero.config.rules.limits import one_of
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, head_width, loss_keys, one_head
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig

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
