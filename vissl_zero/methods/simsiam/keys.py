"""SimSiam's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class SimSiamLossConfig:
    """``simsiam_loss``: negative cosine similarity, https://arxiv.org/abs/2011.10566. It has no keys."""


@METHODS.register("simsiam")
class SimSiamSpec(MethodSpec):
    """SimSiam: prediction of the other view, gradient stopped."""

    losses = {"simsiam_loss": SimSiamLossConfig}
    title = "SimSiam"
    paper = "https://arxiv.org/abs/2011.10566"
    views = "2 crops"
    recipe = "digits/simsiam"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, a projector and a predictor."""
        return [*one_head(cfg, "siamese_head"), *two_views(cfg)]
