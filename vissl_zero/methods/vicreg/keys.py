"""VICReg's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.rules.limits import at_least
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class VICRegLossConfig:
    """``vicreg_loss``: variance, invariance, covariance, https://arxiv.org/abs/2105.04906."""

    sim_coeff: float = 25.0
    """Weight of the distance between the views."""
    std_coeff: float = 25.0
    """Weight of what each feature's deviation lacks to 1."""
    cov_coeff: float = 1.0
    """Weight of the covariances between features."""


@METHODS.register("vicreg")
class VICRegSpec(MethodSpec):
    """VICReg: variance, invariance and covariance of two views."""

    losses = {"vicreg_loss": VICRegLossConfig}
    title = "VICReg"
    paper = "https://arxiv.org/abs/2105.04906"
    views = "2 crops"
    couples = "variance and covariance over the batch"
    recipe = "digits/vicreg"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        names = ("sim_coeff", "std_coeff", "cov_coeff")
        numbers = [found for name in names for found in at_least(f"{path}.{name}", getattr(keys, name), 0)]
        return [*one_head(cfg, "mlp"), *two_views(cfg), *numbers]
