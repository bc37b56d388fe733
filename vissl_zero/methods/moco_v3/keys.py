"""MoCo v3's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.rules.limits import above_zero
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class MoCoV3LossConfig:
    """``moco_v3_loss``: symmetric InfoNCE within the batch, https://arxiv.org/abs/2104.02057."""

    momentum: float = 0.99
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    temperature: float = 0.2
    """Divides the cosine similarities."""


@METHODS.register("moco_v3")
class MoCoV3Spec(MethodSpec):
    """MoCo v3: symmetric InfoNCE against the teacher's keys of the batch."""

    losses = {"moco_v3_loss": MoCoV3LossConfig}
    title = "MoCo v3"
    paper = "https://arxiv.org/abs/2104.02057"
    views = "2 crops"
    teacher = "momentum, cosine to 1"
    couples = "negatives: the teacher's keys of the batch"
    recipe = "digits/moco_v3"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, a projector and a predictor."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        numbers = [*share(f"{path}.momentum", keys.momentum), *above_zero(f"{path}.temperature", keys.temperature)]
        return [*one_head(cfg, "siamese_head"), *two_views(cfg), *numbers]
