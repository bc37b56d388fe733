"""VICRegL, VICReg of whole images and of matching places: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omegaconf import MISSING

from vissl_zero.config.constraints import at_least, choice, number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, loss_keys, one_head, two_views
from vissl_zero.methods.two_views_keys import VICRegLossConfig
from vissl_zero.registry import METHODS
from vissl_zero.resolve.boxes import keeps_boxes

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class VICRegLLossConfig(VICRegLossConfig):
    """``vicregl_loss``: VICReg of whole images and of places that match, https://arxiv.org/abs/2210.01571."""

    alpha: float = number(0.75, least=0, most=1)
    """Weight of the loss of whole images; the rest is the weight of the loss of places."""
    num_matches: list[int] = field(default_factory=lambda: [20, 4])
    """Places of a map that are matched by where they lie in the image: of the first crop of a pair, which is one of the
    first two of an image, and of the second. A map with fewer places has all of them matched."""


@dataclass
class VICRegLHeadConfig:
    """``vicregl_head``: VICRegL's expander of features, and that of each place of the last maps."""

    dims: list[int] = MISSING
    """Widths for whole images, from the trunk's features (-1: as many as there are) to the embeddings."""
    map_dims: list[int] = MISSING
    """Widths for places, after the trunk's maps."""
    norm: str = choice("batch", "layer", default="batch")
    """Norm between layers: batch norm, as for a ResNet, or layer norm, as for ConvNeXt."""


_HEAD = "vicregl_head"
_PAIR = 2


@METHODS.register("vicregl")
class VICRegLSpec(MethodSpec):
    """VICRegL: VICReg of two or more views, and of places of their maps that match."""

    losses = {"vicregl_loss": VICRegLLossConfig}
    heads = {_HEAD: VICRegLHeadConfig}
    title = "VICRegL"
    paper = "https://arxiv.org/abs/2210.01571"
    views = "2 or more crops of any sizes, with their boxes; the first two are compared with all"
    couples = "variance and covariance over the batch, of images and of places"
    recipe = "digits/vicregl"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two or more views whose boxes are kept, and one head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        names = ("sim_coeff", "std_coeff", "cov_coeff")
        problems = [problem for name in names for problem in at_least(f"{path}.{name}", getattr(keys, name), 0)]
        problems += [*one_head(cfg, _HEAD), *two_views(cfg, exactly=False)]
        if len(keys.num_matches) != _PAIR or min(keys.num_matches) < 1:
            must, fix = "must be two numbers of at least 1", f"Write config.{path}.num_matches=[20,4]."
            problems.append(Problem(f"config.{path}.num_matches", str(keys.num_matches), must, fix))
        counts = crops_of(cfg)
        if counts and not keeps_boxes(cfg):
            must = f"must make crops that keep their boxes for {cfg.LOSS['name']}, which matches places by them"
            fix = "Write keeps_boxes: true in ImgPilToMultiCrop."
            problems.append(Problem("config.DATA.TRAIN.TRANSFORMS", "keeps_boxes: false", must, fix))
        if cfg.MODEL.VIEWS_APART and counts and len(counts) > 1:
            must = f"must be false for {cfg.LOSS['name']} with crops of {len(counts)} sizes"
            problems.append(
                Problem("config.MODEL.VIEWS_APART", "True", must, "Leave it out, or make crops of one size.")
            )
        return problems
