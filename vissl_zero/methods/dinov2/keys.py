"""DINOv2's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.ibot.keys import IBOTSpec, patch_distillation
from vissl_zero.methods.spec import crops_of, loss_keys, share
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class DINOv2LossConfig:
    """``dinov2_loss``: DINO, iBOT and KoLeo with Sinkhorn's centring, https://arxiv.org/abs/2304.07193."""

    momentum: float = 0.992
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    student_temp: float = number(0.1, above=0, most=1000)
    """Divides the student's scores."""
    teacher_temp_min: float = number(0.04, above=0, most=1000)
    """Divides the teacher's scores in the first step."""
    teacher_temp_max: float = number(0.07, above=0, most=1000)
    """Divides them after the warm-up."""
    teacher_temp_warmup_iters: int = number(37500, least=0)
    """Optimizer steps in which the teacher's temperature goes from one to the other in a straight line."""
    dino_weight: float = number(1.0, least=0)
    """Weight of the loss of crops."""
    ibot_weight: float = number(1.0, least=0)
    """Weight of the loss of masked patches."""
    koleo_weight: float = number(0.1, least=0)
    """Weight of KoLeo on the large crops' features."""
    mask_ratio: list[float] = field(default_factory=lambda: [0.1, 0.5])
    """Least and largest share of the patches of a crop that are masked, in blocks."""
    mask_probability: float = 0.5
    """Share of the large crops that are masked at all."""
    num_global_crops: int | None = None
    """Crops that the teacher sees and that are masked: those of the first size; null: from the transforms, which also
    win over a different number."""


@METHODS.register("dinov2")
class DINOv2Spec(IBOTSpec):
    """DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centring."""

    losses = {"dinov2_loss": DINOv2LossConfig}
    heads = {}
    shape_keys = ()
    title = "DINOv2"
    paper = "https://arxiv.org/abs/2304.07193"
    couples = "Sinkhorn over the teacher's crops and masked patches; KoLeo's nearest neighbour in the batch"
    recipe = "digits/dinov2"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Crops from the transforms."""
        crops = crops_of(cfg)
        return {"num_global_crops": (crops[0] if crops else None, "transforms")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """As iBOT."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        found = patch_distillation(cfg, path, keys.mask_ratio, keys.mask_probability)
        return [*found, *share(f"{path}.momentum", keys.momentum)]
