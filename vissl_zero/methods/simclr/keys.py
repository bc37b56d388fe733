"""SimCLR's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.rules.limits import above_zero
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class SimCLRLossConfig:
    """``simclr_info_nce_loss``: NT-Xent, https://arxiv.org/abs/2002.05709."""

    temperature: float = 0.1
    """Divides the cosine similarities."""


@METHODS.register("simclr")
class SimCLRSpec(MethodSpec):
    """SimCLR: NT-Xent between two views, negatives from all ranks."""

    losses = {"simclr_info_nce_loss": SimCLRLossConfig}
    title = "SimCLR"
    paper = "https://arxiv.org/abs/2002.05709"
    views = "2 crops"
    couples = "negatives: all images of the batch"
    recipe = "digits/simclr"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, one projection head."""
        temperature = above_zero(f"LOSS.{cfg.LOSS['name']}.temperature", loss_keys(cfg).temperature)
        return [*one_head(cfg, "mlp"), *two_views(cfg), *temperature]
