"""DINO's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import above_zero, at_least, number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, heads_of, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run_config import RunConfig


@dataclass
class DINOLossConfig:
    """``dino_loss``: self-distillation, https://arxiv.org/abs/2104.14294."""

    momentum: float = 0.996
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    student_temp: float = 0.1
    """Divides the student's scores."""
    teacher_temp_min: float = 0.04
    """Divides the teacher's scores in the first step."""
    teacher_temp_max: float = 0.07
    """Divides them after the warm-up."""
    teacher_temp_warmup_iters: int = 37500
    """Optimizer steps in which the teacher's temperature goes from one to the other in a straight line."""
    crops_for_teacher: list[int] = field(default_factory=lambda: [0, 1])
    """Crops that the teacher sees, the first of all."""
    ema_center: float = 0.9
    """Weight of the past in the centre."""
    output_dim: int | None = None
    """Prototypes; null: from the head, which also wins over a different number."""


@dataclass
class DINOHeadConfig:
    """``dino_head``: an MLP with GELU and one layer of weight-normalised prototypes, as DINO's authors have it."""

    in_dim: int = number(MISSING, least=1)
    """Features of the trunk."""
    num_clusters: list[int] = MISSING
    """Number of prototypes: one entry."""
    use_bn: bool = False
    """Batch norm between the layers of the MLP."""
    normalize_last_layer: bool = True
    """Prototypes have unit length; off: the length of each is learned."""
    num_layers: int = number(3, least=1, most=100)
    """Layers of the MLP."""
    hidden_dim: int = number(2048, least=1)
    """Width between them."""
    bottleneck_dim: int = number(256, least=1)
    """Width of the embedding that is scored, which has unit length."""


@METHODS.register("dino")
class DINOSpec(MethodSpec):
    """DINO: self-distillation from a teacher that sees the large crops."""

    losses = {"dino_loss": DINOLossConfig}
    heads = {"dino_head": DINOHeadConfig}
    shape_keys = ("output_dim",)
    title = "DINO"
    paper = "https://arxiv.org/abs/2104.14294"
    views = "2 or more crops of any sizes; the teacher sees the first"
    teacher = "momentum, cosine to 1"
    couples = "the centre: mean of the teacher's scores over the batch"
    recipe = "digits/dino"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """output_dim from the head."""
        counts = next((options.get("num_clusters") for _, options in heads_of(cfg)), None)
        return {"output_dim": (counts[0] if counts else None, "head")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two crops or more, one head with one layer of prototypes."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "swav_head", "dino_head"),
            *self._one_layer(cfg),
            *two_views(cfg, exactly=False),
            *_teacher_crops(keys.crops_for_teacher, f"config.{path}.crops_for_teacher", crops_of(cfg)),
            *share(f"{path}.momentum", keys.momentum),
            *share(f"{path}.ema_center", keys.ema_center),
            *above_zero(f"{path}.student_temp", keys.student_temp),
            *above_zero(f"{path}.teacher_temp_min", keys.teacher_temp_min),
            *above_zero(f"{path}.teacher_temp_max", keys.teacher_temp_max),
            *at_least(f"{path}.teacher_temp_warmup_iters", keys.teacher_temp_warmup_iters, 0),
        ]

    def _one_layer(self, cfg: RunConfig) -> list[Problem]:
        counts = next((options.get("num_clusters") for _, options in heads_of(cfg)), None)
        if counts is None or len(counts) == 1:
            return []
        must = "must have one layer of prototypes for dino_loss"
        return [
            Problem("config.MODEL.HEAD.PARAMS", str(list(counts)), must, "Write num_clusters: [65536], for example.")
        ]


def _teacher_crops(crops: list[int], key: str, counts: list[int] | None) -> list[Problem]:
    """The teacher's crops are the first ones, so that teacher and student number them in the same way."""
    total = sum(counts or [])
    if crops and crops == list(range(len(crops))) and len(crops) <= max(total, 1):
        return []
    must = f"must be the first crops, in order, and at most the {total} that the transforms make"
    return [Problem(key, str(crops), must, "Write [0, 1], the two large crops.")]
