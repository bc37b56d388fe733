"""Two views without negatives: BYOL, SimSiam, Barlow Twins and VICReg: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.constraints import above_zero, at_least
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run_config import RunConfig


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
