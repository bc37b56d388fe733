"""SimMIM's keys, head and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, one_head, one_size, patch_trunk
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class PixelHeadConfig:
    """``pixel_head``: one linear layer from a patch's token to its pixels."""

    dims: list[int] = MISSING
    """Two widths: the trunk's features, and 3 times the pixels of a patch."""


@dataclass
class SimMIMLossConfig:
    """``simmim_loss``: absolute error of masked pixels, https://arxiv.org/abs/2111.09886."""

    mask_ratio: float = number(0.6, above=0, below=1)
    """Share of the image that is masked, at random."""
    mask_patch_size: int = number(32, least=1, most=2**16)
    """Side of the squares that are masked, in pixels: a multiple of the trunk's patches."""


@METHODS.register("simmim")
class SimMIMSpec(MethodSpec):
    """SimMIM: pixels of masked patches by one linear layer."""

    losses = {"simmim_loss": SimMIMLossConfig}
    heads = {"pixel_head": PixelHeadConfig}
    title = "SimMIM"
    paper = "https://arxiv.org/abs/2111.09886"
    views = "crops of one size, masked"
    recipe = "digits/simmim"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """A vision transformer with a mask token, a head of pixels, one size of crops."""
        return [*one_head(cfg, "pixel_head"), *patch_trunk(cfg, mask_token=True), *one_size(cfg)]
