"""BYOL's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class BYOLLossConfig:
    """``byol_loss``: prediction of a teacher's projection, https://arxiv.org/abs/2006.07733."""

    momentum: float = 0.99
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""


@METHODS.register("byol")
class BYOLSpec(MethodSpec):
    """BYOL: prediction of a teacher's projection of the other view."""

    losses = {"byol_loss": BYOLLossConfig}
    title = "BYOL"
    paper = "https://arxiv.org/abs/2006.07733"
    views = "2 crops"
    teacher = "momentum, cosine to 1"
    recipe = "digits/byol"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, a projector and a predictor."""
        momentum = share(f"LOSS.{cfg.LOSS['name']}.momentum", loss_keys(cfg).momentum)
        return [*one_head(cfg, "siamese_head"), *two_views(cfg), *momentum]
