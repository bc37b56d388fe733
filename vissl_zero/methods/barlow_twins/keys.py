"""Barlow Twins's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.rules.limits import above_zero, at_least
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class BarlowTwinsLossConfig:
    """``barlow_twins_loss``: cross-correlation towards the identity, https://arxiv.org/abs/2103.03230."""

    lambda_: float = 0.0051
    """Weight of the elements off the diagonal."""
    scale_loss: float = 0.024
    """Factor of the whole loss."""


@METHODS.register("barlow_twins")
class BarlowTwinsSpec(MethodSpec):
    """Barlow Twins: cross-correlation of two views towards the identity."""

    losses = {"barlow_twins_loss": BarlowTwinsLossConfig}
    title = "Barlow Twins"
    paper = "https://arxiv.org/abs/2103.03230"
    views = "2 crops"
    couples = "cross-correlation over the batch"
    recipe = "digits/barlow_twins"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        numbers = [*at_least(f"{path}.lambda_", keys.lambda_, 0), *above_zero(f"{path}.scale_loss", keys.scale_loss)]
        return [*one_head(cfg, "mlp"), *two_views(cfg), *numbers]
