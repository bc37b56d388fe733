"""MAE's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, one_head, one_size, patch_trunk
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class MAELossConfig:
    """``mae_loss``: squared error of hidden patches' pixels, https://arxiv.org/abs/2111.06377."""

    mask_ratio: float = number(0.75, above=0, below=1)
    """Share of the patches that are left out, at random."""
    normalize_pixels: bool = True
    """Bring the pixels of each patch to mean 0 and variance 1 before they are predicted."""


@METHODS.register("mae")
class MAESpec(MethodSpec):
    """MAE: pixels of hidden patches from the few that are seen."""

    losses = {"mae_loss": MAELossConfig}
    title = "MAE"
    paper = "https://arxiv.org/abs/2111.06377"
    views = "crops of one size; a quarter of the patches"
    recipe = "digits/mae"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """A vision transformer, a predictor, one size of crops."""
        return [*one_head(cfg, "patch_predictor"), *patch_trunk(cfg), *one_size(cfg)]
