"""Masked image modeling (MAE, SimMIM, MaskFeat, I-JEPA, data2vec): keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, head_width, loss_keys, one_head, one_size, patch_trunk, share
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class MAELossConfig:
    """``mae_loss``: squared error of hidden patches' pixels, https://arxiv.org/abs/2111.06377."""

    # Neighboring patches are alike: only with most of them hidden does the task need more than interpolation (section
    # 3).
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

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer, a predictor, one size of crops."""
        return [*one_head(cfg, "patch_predictor"), *patch_trunk(cfg), *one_size(cfg)]


@dataclass
class PixelHeadConfig:
    """``pixel_head``: one linear layer from a patch's token to its pixels."""

    dims: list[int] = MISSING
    """Two widths: the trunk's features, and the pixels of a patch in all channels (-1: those of the trunk)."""


@dataclass
class SimMIMLossConfig:
    """``simmim_loss``: absolute error of masked pixels, https://arxiv.org/abs/2111.09886."""

    mask_ratio: float = number(0.6, above=0, below=1)
    """Share of the image that is masked, at random."""
    # Table 1 of the paper: small masked patches are easy to fill in from their neighbors.
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

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer with a mask token, a head of pixels, one size of crops."""
        return [*one_head(cfg, "pixel_head"), *patch_trunk(cfg, mask_token=True), *one_size(cfg)]


@dataclass
class HOGHeadConfig:
    """``hog_head``: one linear layer from a masked patch's token to the histograms of its cells."""

    dims: list[int] = MISSING
    """Two widths: the trunk's features, and channels times bins times cells of a patch (108: 3 x 9 x 4)."""


@dataclass
class MaskFeatLossConfig:
    """``maskfeat_loss``: squared error of masked patches' HOG, https://arxiv.org/abs/2112.09133."""

    mask_ratio: float = number(0.4, above=0, below=1)
    """Share of the patches that are masked, in blocks as BEiT's."""
    num_bins: int = number(9, least=1, most=360)
    """Orientations that gradients are counted by, from 0 to 180 degrees."""
    cell_size: int = number(8, least=1, most=2**16)
    """Side of the cells that have a histogram for each channel, in pixels: it divides the trunk's patches."""


@METHODS.register("maskfeat")
class MaskFeatSpec(MethodSpec):
    """MaskFeat: histograms of oriented gradients of masked patches."""

    losses = {"maskfeat_loss": MaskFeatLossConfig}
    heads = {"hog_head": HOGHeadConfig}
    title = "MaskFeat"
    paper = "https://arxiv.org/abs/2112.09133"
    views = "crops of one size, masked"
    recipe = "digits/maskfeat"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer with a mask token, a head of histograms, one size of crops."""
        return [*one_head(cfg, "hog_head"), *patch_trunk(cfg, mask_token=True), *one_size(cfg)]


@dataclass
class IJEPALossConfig:
    """``ijepa_loss``: regression of a teacher's patch embeddings, https://arxiv.org/abs/2301.08243."""

    momentum: float = 0.996
    """Weight of the teacher's past at the start; it grows to 1 in a straight line."""
    num_targets: int = number(4, least=1, most=100)
    """Blocks of an image that are predicted, each by itself; they may overlap."""
    # The middle of the paper's range, 0.15 to 0.2.
    target_scale: float = number(0.175, above=0, most=1)
    """Share of the patches in each of them."""
    target_ratio: list[float] = field(default_factory=lambda: [0.75, 1.5])
    """Least and largest height of a block over its width."""
    context_scale: float = number(0.3, above=0, most=1)
    """Share of the patches that the student sees, at random among those that are in no target."""
    beta: float = number(1.0, above=0, most=1000)
    """Differences below it are squared."""


@METHODS.register("ijepa")
class IJEPASpec(MethodSpec):
    """I-JEPA: a teacher's embeddings of blocks from the patches around them."""

    losses = {"ijepa_loss": IJEPALossConfig}
    title = "I-JEPA"
    paper = "https://arxiv.org/abs/2301.08243"
    views = "crops of one size; the student sees a part, the teacher all"
    teacher = "momentum, linear to 1"
    teacher_follows = True
    recipe = "digits/ijepa"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for a vision transformer, a predictor, one size of crops, and patches left for the context."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        problems = [*one_head(cfg, "patch_predictor"), *patch_trunk(cfg), *one_size(cfg)]
        problems += share(f"{path}.momentum", keys.momentum)
        if len(keys.target_ratio) != 2 or not 0 < keys.target_ratio[0] <= keys.target_ratio[1]:
            got, must = str(list(keys.target_ratio)), "must be two numbers above 0, the least and the largest"
            problems.append(Problem(f"config.{path}.target_ratio", got, must, "Write [0.75, 1.5]."))
        if head_width(cfg) == -1:
            must, fix = "must end in the trunk's features, which are predicted", "Write their number in its place."
            problems.append(Problem("config.MODEL.HEAD.PARAMS[0][1].dims", "-1", must, fix))
        taken = keys.num_targets * keys.target_scale
        # Targets may overlap, but an image whose targets do not must still have its context.
        if taken + keys.context_scale > 1 + 1e-9:
            must = f"must leave room for the context: {taken:g} of the patches may be targets"
            fix = f"Write context_scale={max(1 - taken, 0):.2g}, or lower target_scale."
            problems.append(Problem(f"config.{path}.context_scale", str(keys.context_scale), must, fix))
        return problems


@dataclass
class LatentHeadConfig:
    """``latent_head``: one linear layer from a masked patch's token to the teacher's embedding of it."""

    dims: list[int] = MISSING
    """Two widths, both those of the trunk's features."""


@dataclass
class Data2VecLossConfig:
    """``data2vec_loss``: regression of the mean of a teacher's last blocks, https://arxiv.org/abs/2202.03555."""

    momentum: float = 0.9998
    """Weight of the teacher's past, constant."""
    mask_ratio: float = number(0.6, above=0, below=1)
    """Share of the patches that the student does not see, in blocks as BEiT's."""
    average_top_k_layers: int = number(6, least=1, most=1000)
    """The teacher's last blocks whose outputs are averaged."""
    beta: float = number(2.0, above=0, most=1000)
    """Differences below it are squared."""


@METHODS.register("data2vec")
class Data2VecSpec(MethodSpec):
    """data2vec: a teacher's embeddings of masked patches, averaged over its last blocks."""

    losses = {"data2vec_loss": Data2VecLossConfig}
    heads = {"latent_head": LatentHeadConfig}
    title = "data2vec"
    paper = "https://arxiv.org/abs/2202.03555"
    views = "crops of one size, masked; the teacher sees them whole"
    teacher = "momentum, constant"
    teacher_follows = True
    recipe = "digits/data2vec"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer with mask token, blocks enough, a head of latents, one crop size."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        problems = [*one_head(cfg, "latent_head"), *patch_trunk(cfg, mask_token=True), *one_size(cfg)]
        problems += share(f"{path}.momentum", keys.momentum)
        depth = cfg.MODEL.TRUNK.VISION_TRANSFORMERS.NUM_LAYERS
        if cfg.MODEL.TRUNK.NAME == "vision_transformer" and keys.average_top_k_layers > depth:
            key, got = f"config.{path}.average_top_k_layers", str(keys.average_top_k_layers)
            problems.append(Problem(key, got, f"must be at most the trunk's {depth} blocks", f"Write {depth} or less."))
        return problems
