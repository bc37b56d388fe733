"""DINOv3, DINOv2 with Gram anchoring: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.dino_keys import DINOv2LossConfig, DINOv2Spec, IBOTHeadConfig, distills_patches
from vissl_zero.methods.spec import loss_keys, share
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class DINOv3HeadConfig(IBOTHeadConfig):
    """``dinov3_head``: ``ibot_head``, which gives the patches themselves too."""


@dataclass
class DINOv3LossConfig(DINOv2LossConfig):
    """``dinov3_loss``: ``dinov2_loss`` and Gram anchoring, https://arxiv.org/abs/2508.10104."""

    gram_weight: float = number(2.0, least=0)
    """Weight of the squared distance between the similarities of an image's patches and those of the anchor."""
    # A share of the run. In the paper it is step 1,000,000 of a run whose schedules are constant.
    gram_start: float = number(0.9, least=0, most=1)
    """Share of the run before that loss begins; the anchor is then a copy of the teacher. 0: from the first step."""
    gram_interval: int = number(10_000, least=1)
    """Optimizer steps between two copies."""
    gram_updates: int = number(3, least=1)
    """Copies in all, the one at the start included."""


@METHODS.register("dinov3")
class DINOv3Spec(DINOv2Spec):
    """DINOv3: DINOv2, and patches whose similarities stay those of an earlier teacher (Gram anchoring)."""

    losses = {"dinov3_loss": DINOv3LossConfig}
    heads = {"dinov3_head": DINOv3HeadConfig}
    title = "DINOv3"
    paper = "https://arxiv.org/abs/2508.10104"
    teacher = "momentum, cosine to 1; an anchor, which copies it a few times"
    recipe = "digits/dinov3"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe by DINOv2's rules, with ``dinov3_head``."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        problems = distills_patches(cfg, path, keys.mask_ratio, keys.mask_probability, ("dinov3_head",))
        return [*problems, *share(f"{path}.momentum", keys.momentum)]
