"""Keys and rules of SwAV with a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.errors import Problem
from vissl_zero.methods.spec import loss_keys, share
from vissl_zero.methods.swav.keys import SwAVLossConfig, SwAVSpec
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class SwAVMomentumLossConfig(SwAVLossConfig):
    """``swav_momentum_loss``: SwAV whose assignments, and queue, come from a momentum copy of the model."""

    momentum: float = 0.99
    """Weight of the teacher's past."""


@METHODS.register("swav_momentum")
class SwAVMomentumSpec(SwAVSpec):
    """SwAV with assignments from a teacher."""

    losses = {"swav_momentum_loss": SwAVMomentumLossConfig}
    heads = {}
    title = "SwAV with momentum"
    teacher = "momentum, constant"
    recipe = "digits/swav_momentum"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """SwAV's, and a momentum below 1."""
        return [*super().problems(cfg, host), *share(f"LOSS.{cfg.LOSS['name']}.momentum", loss_keys(cfg).momentum)]
