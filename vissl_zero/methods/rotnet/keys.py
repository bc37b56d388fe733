"""RotNet's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, head_width, one_head, one_size
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig

NUM_ANGLES = 4


@dataclass
class RotNetLossConfig:
    """``rotnet_loss``: by which quarter turn was it rotated, https://arxiv.org/abs/1803.07728."""

    all_angles: bool = True
    """Every crop at all four angles, as published; false: at one, drawn anew in every step (VISSL)."""


@METHODS.register("rotnet")
class RotNetSpec(MethodSpec):
    """RotNet: predicts which of four rotations an image has."""

    losses = {"rotnet_loss": RotNetLossConfig}
    title = "RotNet"
    paper = "https://arxiv.org/abs/1803.07728"
    views = "1 or more square crops of one size, each at 4 angles, or at one"
    recipe = "digits/rotnet"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """One size, a head with an output per angle."""
        return [*one_head(cfg, "mlp"), *one_size(cfg), *self._outputs(cfg)]

    def _outputs(self, cfg: RunConfig) -> list[Problem]:
        width = head_width(cfg)
        if width in (None, NUM_ANGLES):
            return []
        must = f"must end in {NUM_ANGLES} outputs for rotnet_loss, one per angle"
        return [Problem("config.MODEL.HEAD.PARAMS", str(width), must, f"Write dims: [..., {NUM_ANGLES}].")]
