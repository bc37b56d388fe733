"""SimCLR's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vissl_zero.config.rules.limits import above_zero
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class SimCLRLossConfig:
    """``simclr_info_nce_loss``: NT-Xent, https://arxiv.org/abs/2002.05709."""

    temperature: float = 0.1
    """Divides the cosine similarities."""


@dataclass
class MultiCropSimCLRLossConfig(SimCLRLossConfig):
    """``multicrop_simclr_info_nce_loss``: NT-Xent with every other crop of an image as a positive of its own."""

    num_crops: int | None = None
    """Crops of an image; null: from the transforms, which also win over a different number."""


@METHODS.register("simclr")
class SimCLRSpec(MethodSpec):
    """SimCLR: NT-Xent between views, negatives from all ranks."""

    losses = {
        "simclr_info_nce_loss": SimCLRLossConfig,
        "multicrop_simclr_info_nce_loss": MultiCropSimCLRLossConfig,
    }
    title = "SimCLR"
    paper = "https://arxiv.org/abs/2002.05709"
    views = "2 crops; multicrop: 2 or more of any sizes"
    couples = "negatives: all images of the batch"
    recipe = "digits/simclr"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """The number of crops."""
        if not _has_many_crops(cfg):
            return {}
        return {"num_crops": (sum(crops_of(cfg) or []) or None, "transforms")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """Two views, or more; one projection head."""
        temperature = above_zero(f"LOSS.{cfg.LOSS['name']}.temperature", loss_keys(cfg).temperature)
        return [*one_head(cfg, "mlp"), *two_views(cfg, not _has_many_crops(cfg)), *temperature]


def _has_many_crops(cfg: RunConfig) -> bool:
    return bool(cfg.LOSS["name"] == "multicrop_simclr_info_nce_loss")
