"""Keys of the built-in trunks. The modules that build them register with these classes."""

from __future__ import annotations

from dataclasses import dataclass

from vissl_zero.errors import Problem


@dataclass
class RegNetConfig:
    """``MODEL.TRUNK.REGNET``: RegNet X/Y of https://arxiv.org/abs/2003.13678, by ``name`` or by its parameters.

    Either ``name`` or all of depth, w_0, w_a, w_m and group_width; never both.
    """

    name: str | None = None
    """Published network, such as ``regnet_y_400mf``; null: built from the parameters below."""
    depth: int | None = None
    """Number of blocks over all stages."""
    w_0: int | None = None
    """Width of the first block before quantisation, in channels."""
    w_a: float | None = None
    """Slope of the width over the blocks, in channels per block."""
    w_m: float | None = None
    """Ratio between the widths of neighbouring stages."""
    group_width: int | None = None
    """Channels per group of the grouped convolutions."""
    bottleneck_multiplier: float = 1.0
    """Width inside a block over the width of the block."""
    stem_type: str = "SIMPLE_STEM_IN"
    """First layers: SIMPLE_STEM_IN (3x3, stride 2), RES_STEM_IN (7x7, stride 2, max pooling) or, for images under 64
    pixels, RES_STEM_CIFAR (3x3, stride 1)."""
    stem_width: int = 32
    """Channels of the first convolution."""
    block_type: str = "RES_BOTTLENECK_BLOCK"
    """RES_BOTTLENECK_BLOCK, RES_BOTTLENECK_LINEAR_BLOCK, VANILLA_BLOCK or RES_BASIC_BLOCK."""
    activation_type: str = "RELU"
    """RELU or SILU."""
    use_se: bool = True
    """Squeeze-and-excitation in every block: true is RegNetY, false RegNetX."""
    se_ratio: float = 0.25
    """Channels inside squeeze-and-excitation over the block's input channels."""
    bn_epsilon: float = 1e-5
    """Added to the variance in batch norm."""
    bn_momentum: float = 0.1
    """Weight of the newest batch in the running statistics of batch norm."""


@dataclass
class ResNetConfig:
    """``MODEL.TRUNK.RESNETS``: ResNet of https://arxiv.org/abs/1512.03385 (stride in the 3x3 convolution)."""

    DEPTH: int = 50
    """Layers: 18, 34, 50, 101 or 152."""
    WIDTH_MULTIPLIER: int = 1
    """Channels of every layer over those of the published network."""
    NORM: str = "BatchNorm"
    """Normalisation: BatchNorm or GroupNorm."""
    GROUPNORM_GROUPS: int = 32
    """Groups of GroupNorm; no effect with BatchNorm."""
    GROUPS: int = 1
    """Groups of the 3x3 convolutions (ResNeXt: 32)."""
    WIDTH_PER_GROUP: int = 64
    """Channels per group of the first stage."""
    ZERO_INIT_RESIDUAL: bool = False
    """Start every residual branch at zero (weight of its last norm)."""
    STANDARDIZE_CONVOLUTIONS: bool = False
    """Bring each filter to mean 0 and deviation 1 whenever it is applied (for GroupNorm)."""
    LAYER4_STRIDE: int = 2
    """Stride of the last stage: 1 or 2."""
    STEM_TYPE: str = "RES_STEM_IN"
    """First layers: RES_STEM_IN (7x7, stride 2, max pooling) or, for images under 64 pixels, RES_STEM_CIFAR (3x3)."""


# Trunk -> its block of keys under MODEL.TRUNK; a trunk of one's own has PARAMS.
TRUNK_BLOCKS = {"regnet": "REGNET", "resnet": "RESNETS"}
# What makes a RegNet when no name does.
REGNET_PARAMETERS: tuple[str, ...] = ("depth", "w_0", "w_a", "w_m", "group_width")
# Least value of each, and the least step between values where there is one.
_REGNET_LEAST = {"depth": 1, "w_0": 8, "w_a": 0, "group_width": 1, "stem_width": 1}


def regnet_problems(config: RegNetConfig) -> list[Problem]:
    """Parameters of a RegNet that make none; those that are null are left to others to miss."""
    key, found = "config.MODEL.TRUNK.REGNET", []
    for name, least in _REGNET_LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            found.append(Problem(f"{key}.{name}", str(value), f"must be at least {least}", f"Write {least} or more."))
    for name in ("bottleneck_multiplier", "se_ratio"):
        if not getattr(config, name) > 0:
            found.append(Problem(f"{key}.{name}", str(getattr(config, name)), "must be above 0", "Leave it out."))
    if config.w_0 is not None and config.w_0 % 8:
        found.append(Problem(f"{key}.w_0", str(config.w_0), "must be a multiple of 8", "Write 16, say."))
    if config.w_m is not None and not config.w_m > 1:
        found.append(Problem(f"{key}.w_m", str(config.w_m), "must be above 1", "Write 2.5, say."))
    return found


RESNET_DEPTHS: tuple[int, ...] = (18, 34, 50, 101, 152)
