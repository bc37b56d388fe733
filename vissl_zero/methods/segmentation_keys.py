"""Segmentation: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from vissl_zero.config.blocks.data import MIXING_COLLATOR
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, one_head
from vissl_zero.registry import METHODS
from vissl_zero.resolve.pairs import transforms_of_pairs

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class SegmentationLossConfig:
    """``segmentation_loss``: cross-entropy of the class of every pixel; pixels of class 255 do not count."""

    weight: list[float] | None = None
    """Weight of each class; null: all equal."""


@dataclass
class FCNHeadConfig:
    """``fcn_head``: classes of pixels from the trunk's last maps, https://arxiv.org/abs/1411.4038."""

    dims: list[int] = MISSING
    """Channels, from those of the maps (-1: as many as there are) to the outputs (-1: as many as there are classes).
    Two are a linear head, a 1 x 1 convolution; each one between is a 3 x 3 convolution with norm and ReLU before it."""
    use_bn: bool = True
    """Batch norm between the layers."""


@METHODS.register("segmentation")
class SegmentationSpec(MethodSpec):
    """Segmentation: cross-entropy of the class of every pixel."""

    losses = {"segmentation_loss": SegmentationLossConfig}
    heads = {"fcn_head": FCNHeadConfig}
    title = "Segmentation"
    paper = "https://arxiv.org/abs/1411.4038"
    views = "1 crop, with a mask"
    couples = "the number of pixels that count"
    recipe = "digits/segmentation"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one head of pixels, transforms that also apply to masks, and images that are not mixed."""
        problems = [*one_head(cfg, "fcn_head"), *transforms_of_pairs(cfg)]
        if cfg.DATA.TRAIN.COLLATE_FUNCTION == MIXING_COLLATOR:
            must, fix = "must not mix images with masks", "Write default_collate."
            problems.append(Problem("config.DATA.TRAIN.COLLATE_FUNCTION", MIXING_COLLATOR, must, fix))
        if cfg.MODEL.VIEWS_APART:
            problems.append(
                Problem("config.MODEL.VIEWS_APART", "True", "must be false: there is one view", "Leave it out.")
            )
        return problems
