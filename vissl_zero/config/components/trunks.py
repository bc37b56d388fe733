"""Keys of the built-in trunks. The modules that build them register with these classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from vissl_zero.config.block_data import declared_keys
from vissl_zero.config.constraints import choice, constraint_problems, number
from vissl_zero.errors import Problem

# What makes a RegNet when no name does.
REGNET_PARAMETERS: tuple[str, ...] = ("depth", "w_0", "w_a", "w_m", "group_width")


@dataclass
class RegNetConfig:
    """``MODEL.TRUNK.REGNET``: RegNet X/Y of https://arxiv.org/abs/2003.13678, by ``name`` or by its parameters.

    Either ``name`` or all of depth, w_0, w_a, w_m and group_width; never both.
    """

    ANYNET: ClassVar[str] = "anynet"
    # What a published name says by itself.
    FIXED_BY_NAME: ClassVar[tuple[str, ...]] = (
        "bottleneck_multiplier",
        "block_type",
        "activation_type",
        "use_se",
        "se_ratio",
        *REGNET_PARAMETERS,
    )
    name: str | None = None
    """Published network, such as ``regnet_y_400mf``; null: built from the parameters below; anynet: from depths,
    widths, group_widths, bottleneck_multipliers and strides."""
    depths: list[int] = number([], least=1, most=10000)
    """anynet: blocks of each stage."""
    widths: list[int] = number([], least=1, most=2**20)
    """anynet: channels of each stage."""
    group_widths: list[int] = number([], least=1, most=2**20)
    """anynet: channels per group in each stage."""
    bottleneck_multipliers: list[float] = number([], above=0, most=1024)
    """anynet: width inside the blocks of each stage over their width."""
    strides: list[int] = number([], least=1, most=16)
    """anynet: stride of the first block of each stage."""
    depth: int | None = number(None, least=1, most=10000)
    """Number of blocks over all stages."""
    w_0: int | None = number(None, least=8, most=2**20)
    """Width of the first block before quantization, in channels."""
    w_a: float | None = number(None, least=0, most=2**20)
    """Slope of the width over the blocks, in channels per block."""
    w_m: float | None = number(None, above=1, most=2**20)
    """Ratio between the widths of neighboring stages."""
    group_width: int | None = number(None, least=1, most=2**20)
    """Channels per group of the grouped convolutions."""
    bottleneck_multiplier: float = number(1.0, above=0, most=1024)
    """Width inside a block over the width of the block."""
    stem_type: str = "SIMPLE_STEM_IN"
    """First layers: SIMPLE_STEM_IN (3x3, stride 2), RES_STEM_IN (7x7, stride 2, max pooling) or, for images under 64
    pixels, RES_STEM_CIFAR (3x3, stride 1)."""
    stem_width: int = number(32, least=1, most=2**20)
    """Channels of the first convolution."""
    block_type: str = "RES_BOTTLENECK_BLOCK"
    """RES_BOTTLENECK_BLOCK, RES_BOTTLENECK_LINEAR_BLOCK, VANILLA_BLOCK or RES_BASIC_BLOCK."""
    activation_type: str = "RELU"
    """RELU or SILU."""
    use_se: bool = True
    """Squeeze-and-excitation in every block: true is RegNetY, false RegNetX."""
    se_ratio: float = number(0.25, above=0, most=1024)
    """Channels inside squeeze-and-excitation over the block's input channels."""
    bn_epsilon: float = number(1e-5, least=0, most=1)
    """Added to the variance in batch norm."""
    bn_momentum: float = number(0.1, least=0, most=1)
    """Weight of the newest batch in the running statistics of batch norm."""


@dataclass
class ResNetConfig:
    """``MODEL.TRUNK.RESNETS``: ResNet of https://arxiv.org/abs/1512.03385 (stride in the 3x3 convolution)."""

    DEPTH: int = choice(18, 34, 50, 101, 152, 200, default=50)
    """Layers: 18, 34, 50, 101, 152 or 200."""
    WIDTH_MULTIPLIER: int = number(1, least=1, most=1024)
    """Channels of every layer over those of the published network."""
    NORM: str = choice("BatchNorm", "GroupNorm", default="BatchNorm")
    """Normalization: BatchNorm or GroupNorm."""
    GROUPNORM_GROUPS: int = number(32, least=1)
    """Groups of GroupNorm; no effect with BatchNorm."""
    GROUPS: int = number(1, least=1, most=2**20)
    """Groups of the 3x3 convolutions (ResNeXt: 32)."""
    WIDTH_PER_GROUP: int = number(64, least=1, most=2**20)
    """Channels per group of the first stage."""
    ZERO_INIT_RESIDUAL: bool = False
    """Start every residual branch at zero (weight of its last norm)."""
    FIRST_WEIGHTS: str = choice("torchvision", "vissl", default="torchvision")
    """How convolutions begin: torchvision, normal by fan-out (https://arxiv.org/abs/1502.01852); vissl, as VISSL's do,
    uniform within 1 / sqrt(fan-in), torch's default."""
    STANDARDIZE_CONVOLUTIONS: bool = False
    """Bring each filter to mean 0 and deviation 1 whenever it is applied (for GroupNorm)."""
    LAYER4_STRIDE: int = choice(1, 2, default=2)
    """Stride of the last stage: 1 or 2."""
    STEM_TYPE: str = choice("RES_STEM_IN", "RES_STEM_CIFAR", default="RES_STEM_IN")
    """First layers: RES_STEM_IN (7x7, stride 2, max pooling) or, for images under 64 pixels, RES_STEM_CIFAR (3x3)."""


@dataclass
class VisionTransformerConfig:
    """``MODEL.TRUNK.VISION_TRANSFORMERS``: ViT of https://arxiv.org/abs/2010.11929 with learned positions."""

    IMAGE_SIZE: int = number(224, least=1, most=2**16)
    """Side of the images that position embeddings are made for, in pixels; they are interpolated for other sizes."""
    PATCH_SIZE: int = number(16, least=1, most=2**16)
    """Side of a patch, in pixels; divides the side of every crop."""
    NUM_LAYERS: int = number(12, least=1, most=10000)
    """Blocks. With HIDDEN_DIM, NUM_HEADS, MLP_DIM: tiny 12, 192, 3, 768; small 12, 384, 6, 1536; base 12, 768, 12,
    3072; large 24, 1024, 16, 4096; huge 32, 1280, 16, 5120; giant 40, 1536, 24, 6144; 7B 40, 4096, 32, 16384."""
    NUM_HEADS: int = number(12, least=1, most=2**20)
    """Attention heads; divides HIDDEN_DIM."""
    HIDDEN_DIM: int = number(768, least=1, most=2**20)
    """Width of tokens and features."""
    MLP_DIM: int = number(3072, least=1, most=2**22)
    """Width inside the MLP of a block."""
    DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of embeddings, of attention's output and in the MLP."""
    ATTENTION_DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of attention weights; takes torch's fused attention away."""
    CLASSIFIER: str = choice("token", "gap", default="token")
    """The feature of an image: token (the class token) or gap (the mean of the patches)."""
    USE_CLASS_TOKEN: bool = True
    """A class token; without one the feature of an image is the mean of its patches, whatever CLASSIFIER says."""
    DROP_PATH_RATE: float = number(0.0, least=0, below=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    QKV_BIAS: bool = False
    """Bias in the projections to queries, keys, and values; the published networks have it."""
    NUM_REGISTERS: int = number(0, least=0, most=10000)
    """Register tokens (https://arxiv.org/abs/2309.16588)."""
    LAYER_SCALE_INIT: float | None = number(None, above=0, most=1000)
    """First value of layer scale (https://arxiv.org/abs/2103.17239); null: no layer scale."""
    PATCH_DROP_RATE: float = number(0.0, least=0, below=1)
    """Share of patches left out in training."""
    USE_MASK_TOKEN: bool = False
    """A learned vector for masked patches, for methods that mask."""


@dataclass
class BeitConfig:
    """``MODEL.TRUNK.BEIT``: BEiT of https://arxiv.org/abs/2106.08254, timm's; its feature is the class token."""

    IMAGE_SIZE: int = number(224, least=1, most=2**16)
    """Side of all images, in pixels."""
    PATCH_SIZE: int = number(16, least=1, most=2**16)
    """Side of a patch, in pixels; divides IMAGE_SIZE."""
    NUM_LAYERS: int = number(12, least=1, most=10000)
    """Blocks."""
    NUM_HEADS: int = number(12, least=1, most=2**20)
    """Attention heads; divides HIDDEN_DIM."""
    HIDDEN_DIM: int = number(768, least=1, most=2**20)
    """Width of tokens and features."""
    MLP_RATIO: float = number(4.0, above=0, most=1024)
    """Width inside the MLP of a block over HIDDEN_DIM."""
    DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of embeddings, of attention's output and in the MLP."""
    ATTENTION_DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of attention weights."""
    DROP_PATH_RATE: float = number(0.0, least=0, below=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    QKV_BIAS: bool = False
    """Bias in the projections to queries and values (keys have none)."""
    USE_ABS_POS_EMB: bool = True
    """Learned embeddings of positions."""
    USE_REL_POS_BIAS: bool = False
    """A learned bias of attention by relative position, in each block."""
    USE_SHARED_REL_POS_BIAS: bool = False
    """One such bias for all blocks."""
    USE_MEAN_POOLING: bool = True
    """No norm after the last block, as in BEiT's pooled models; the feature is still the class token (VISSL)."""
    INIT_VALUES: bool | float = False
    """First value of layer scale; false: no layer scale."""


@dataclass
class XcitConfig:
    """``MODEL.TRUNK.XCIT``: XCiT of https://arxiv.org/abs/2106.09681, timm's; its feature is the class token."""

    IMAGE_SIZE: int = number(224, least=1, most=2**16)
    """Side of the images, in pixels; others work too."""
    PATCH_SIZE: int = choice(8, 16, default=16)
    """Side of a patch, in pixels: 8 or 16."""
    HIDDEN_DIM: int = number(384, least=1, most=2**20)
    """Width of tokens and features."""
    NUM_LAYERS: int = number(12, least=1, most=10000)
    """Blocks of cross-covariance attention; two of class attention follow."""
    NUM_HEADS: int = number(8, least=1, most=2**20)
    """Attention heads; divides HIDDEN_DIM."""
    MLP_RATIO: float = number(4.0, above=0, most=1024)
    """Width inside the MLP of a block over HIDDEN_DIM."""
    DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of embeddings, of attention's output and in the MLP."""
    ATTENTION_DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of attention weights."""
    DROP_PATH_RATE: float = number(0.05, least=0, below=1)
    """Stochastic depth of every block."""
    ETA: float = number(1.0, above=0, most=1000)
    """First value of layer scale."""
    TOKENS_NORM: bool = True
    """Norm of all tokens in class attention, not of the class token alone."""
    QKV_BIAS: bool = True
    """Bias in the projections to queries, keys, and values."""


@dataclass
class ResNetSkConfig:
    """``MODEL.TRUNK.RESNETS_SK``: SimCLR v2's ResNet with selective kernels, https://arxiv.org/abs/2006.10029."""

    DEPTH: int = choice(50, 101, 152, default=152)
    """Layers: 50, 101 or 152."""
    WIDTH_MULTIPLIER: int = number(3, least=1, most=1024)
    """Channels of every layer over those of the published ResNet."""
    SK_RATIO: float = number(0.0625, least=0, most=1)
    """Channels of the network that mixes two kernels over those of a block's inside, at least 32; 0: plain kernels."""


@dataclass
class EfficientNetConfig:
    """``MODEL.TRUNK.EFFICIENT_NETS``: EfficientNet of https://arxiv.org/abs/1905.11946, timm's ``tf_efficientnet``."""

    model_version: str = choice(*(f"B{size}" for size in range(8)), default="B0")
    """B0 to B7; also decides the dropout of the feature, 0.2 to 0.5."""
    bn_momentum: float = number(0.01, least=0, most=1)
    """Weight of the newest batch in the running statistics of batch norm."""
    bn_epsilon: float = number(1e-3, least=0, most=1)
    """Added to the variance in batch norm."""
    drop_connect_rate: float = number(0.2, least=0, below=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    width_divisor: int = number(8, least=1, most=1024)
    """Numbers of channels are multiples of this."""


@dataclass
class MobileNetConfig:
    """``MODEL.TRUNK.MOBILE_NET``: MobileNet v3 of https://arxiv.org/abs/1905.02244, torchvision's or timm's."""

    NAME: str = choice("mobilenetv3_large_100", "mobilenetv3_small_100", default="mobilenetv3_large_100")
    """Size: mobilenetv3_large_100 or mobilenetv3_small_100."""
    TIMM_BN: bool = False
    """mobilenetv3_tv: batch norm with epsilon 1e-5 and momentum 0.1, as in timm; torchvision has 1e-3 and 0.01."""
    TRUNK_ONLY: bool = True
    """mobilenetv3_timm: the feature is the mean of the last block, without the layer that widens it."""


@dataclass
class SwinConfig:
    """``MODEL.TRUNK.SWIN_TRANSFORMER``: Swin of https://arxiv.org/abs/2103.14030, timm's; images of any size."""

    IMAGE_SIZE: int = number(224, least=1, most=2**16)
    """Side of the images that windows are laid out for, in pixels; those of other sizes are padded to windows."""
    PATCH_SIZE: int = number(4, least=1, most=2**16)
    """Side of a patch, in pixels; divides IMAGE_SIZE."""
    EMBED_DIM: int = number(96, least=1, most=2**20)
    """Width of the first stage; each further stage doubles it."""
    DEPTHS: list[int] = number([2, 2, 6, 2], least=1, most=10000)
    """Blocks of each stage."""
    NUM_HEADS: list[int] = number([3, 6, 12, 24], least=1, most=2**20)
    """Attention heads of each stage; divide its width."""
    WINDOW_SIZE: int = number(7, least=1, most=1024)
    """Side of a window, in patches."""
    MLP_RATIO: float = number(4.0, above=0, most=1024)
    """Width inside the MLP of a block over the width of its stage."""
    DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of embeddings, of attention's output and in the MLP."""
    ATTENTION_DROPOUT_RATE: float = number(0.0, least=0, below=1)
    """Dropout of attention weights."""
    DROP_PATH_RATE: float = number(0.1, least=0, below=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    QKV_BIAS: bool = True
    """Bias in the projections to queries, keys, and values."""


@dataclass
class ConvNextConfig:
    """``MODEL.TRUNK.CONVNEXT``: ConvNeXt of https://arxiv.org/abs/2201.03545, timm's."""

    DEPTH: list[int] = number([3, 3, 27, 3], least=1, most=10000)
    """Blocks of each of the four stages."""
    DIMS: list[int] = number([96, 192, 384, 768], least=1, most=2**20)
    """Channels of each stage."""
    DROP_PATH_RATE: float = number(0.0, least=0, below=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""


@dataclass
class ConvitLocality:
    """``MODEL.TRUNK.CONVIT``: ConViT of https://arxiv.org/abs/2103.10697; its sizes stand in VISION_TRANSFORMERS."""

    N_GPSA_LAYERS: int = number(10, least=0, most=10000)
    """First blocks, whose attention is gated between content and position; the class token joins after them."""
    LOCALITY_STRENGTH: float = number(1.0, above=0, most=1000)
    """How closely attention by position looks at one patch at the beginning."""


@dataclass
class ConvitConfig(ConvitLocality):
    """All keys of a ConViT: its own and those of VISION_TRANSFORMERS."""

    # Listed, not inherited: of that block's keys, a ConViT has these alone, and a rule refuses the others.
    IMAGE_SIZE: int = VisionTransformerConfig.IMAGE_SIZE
    """As in VISION_TRANSFORMERS; all images have this size."""
    PATCH_SIZE: int = VisionTransformerConfig.PATCH_SIZE
    """As in VISION_TRANSFORMERS."""
    NUM_LAYERS: int = VisionTransformerConfig.NUM_LAYERS
    """As in VISION_TRANSFORMERS."""
    NUM_HEADS: int = VisionTransformerConfig.NUM_HEADS
    """As in VISION_TRANSFORMERS."""
    HIDDEN_DIM: int = VisionTransformerConfig.HIDDEN_DIM
    """As in VISION_TRANSFORMERS."""
    MLP_DIM: int = VisionTransformerConfig.MLP_DIM
    """As in VISION_TRANSFORMERS."""
    DROPOUT_RATE: float = VisionTransformerConfig.DROPOUT_RATE
    """As in VISION_TRANSFORMERS."""
    ATTENTION_DROPOUT_RATE: float = VisionTransformerConfig.ATTENTION_DROPOUT_RATE
    """As in VISION_TRANSFORMERS."""
    CLASSIFIER: str = VisionTransformerConfig.CLASSIFIER
    """As in VISION_TRANSFORMERS."""
    DROP_PATH_RATE: float = VisionTransformerConfig.DROP_PATH_RATE
    """As in VISION_TRANSFORMERS."""
    QKV_BIAS: bool = VisionTransformerConfig.QKV_BIAS
    """As in VISION_TRANSFORMERS."""


@dataclass
class NoKeys:
    """A trunk without keys."""


@dataclass
class TimmConfig:
    """``MODEL.TRUNK.PARAMS`` of a trunk called ``timm/<model>``: arguments of ``timm.create_model``."""

    name: str = ""
    """Name of the model, after ``timm/``; filled in."""
    use_mask_token: bool = False
    """A learned vector for masked patches; vision transformers only."""
    patch_drop_rate: float = number(0.0, least=0, below=1)
    """Share of patches left out in training; vision transformers only."""
    drop_path_rate: float | None = number(None, least=0, below=1)
    """Stochastic depth of the last block; null: the model's own."""
    layer_norm_eps: float | None = number(None, above=0, most=1)
    """Added to the variance in all layer norms; null: the model's own."""
    last_norm_eps: float | None = number(None, above=0, most=1)
    """The same of the last layer norm alone (transformers' ConvNeXt); null: as the others."""
    position_resize: str = choice("antialiased", "bicubic", "offset", default="antialiased")
    """How positions of a vision transformer are resized for other image sizes: antialiased (timm, DINOv2 with
    registers), bicubic (transformers) or offset (bicubic by a factor of 0.1 patches more: DINO, DINOv2)."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments, such as init_values."""


@dataclass
class TorchvisionConfig:
    """``MODEL.TRUNK.PARAMS`` of a trunk called ``torchvision/<model>``."""

    name: str = ""
    """Name of the model, after ``torchvision/``; filled in."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``torchvision.models.get_model``, such as stochastic_depth_prob."""


# Trunk -> its block of keys under MODEL.TRUNK; other trunks have their keys in PARAMS.
TRUNK_BLOCKS = {"regnet": "REGNET", "resnet": "RESNETS", "vision_transformer": "VISION_TRANSFORMERS"}
TRUNK_BLOCKS |= {"beit": "BEIT", "xcit": "XCIT", "resnet_sk": "RESNETS_SK", "efficientnet": "EFFICIENT_NETS"}
TRUNK_BLOCKS |= {"mobilenetv3_tv": "MOBILE_NET", "mobilenetv3_timm": "MOBILE_NET", "convnext": "CONVNEXT"}
TRUNK_BLOCKS |= {"swin_transformer": "SWIN_TRANSFORMER", "convit": "CONVIT"}
# Trunk -> a block that it reads in addition to its own.
FURTHER_BLOCKS = {"convit": "VISION_TRANSFORMERS"}
_LIBRARIES = ("timm", "torchvision")  # their models are trunks: ``timm/<model>``
# Parameters of a RegNet that is defined stage by stage.
ANYNET_PARAMETERS = ("depths", "widths", "group_widths", "bottleneck_multipliers", "strides")


def vision_transformer_problems(config: VisionTransformerConfig) -> list[Problem]:
    """Return problems of a vision transformer's sizes: out of range, or not divisible."""
    return size_problems("config.MODEL.TRUNK.VISION_TRANSFORMERS", config)


def patch_side(trunk: Any) -> int:
    """Return the side in pixels of a vision transformer's patches, which must divide crops; 1 for other trunks.

    Args:
        trunk: the block MODEL.TRUNK.
    """
    if trunk.NAME in ("vision_transformer", "convit"):
        return max(1, trunk.VISION_TRANSFORMERS.PATCH_SIZE)
    patch_size = (trunk.PARAMS.get("model_args") or {}).get("patch_size")
    if trunk.NAME.startswith("timm/") and isinstance(patch_size, int):
        return max(1, patch_size)
    # timm's names include the patch size; reading it from the model would import timm and torch.
    named = re.match(r"timm/(?:vit|deit)\w*_patch(\d+)_", f"{trunk.NAME}_")
    return int(named[1]) if named else 1


def size_problems(key: str, config: Any) -> list[Problem]:
    """Return problems of a trunk's sizes: out of range, not divisible, or lists of different lengths."""
    problems = list(constraint_problems(config, key))
    # A size of 0, which is reported already, cannot divide another.
    if problems:
        return problems
    for name, divisor in (("HIDDEN_DIM", "NUM_HEADS"), ("IMAGE_SIZE", "PATCH_SIZE")):
        if hasattr(config, name) and getattr(config, name) % getattr(config, divisor):
            must = f"must be a multiple of {divisor}, {getattr(config, divisor)}"
            problems.append(Problem(f"{key}.{name}", str(getattr(config, name)), must, "Change one of them."))
    return problems + _stage_problems(key, config)


def _stage_problems(key: str, config: Any) -> list[Problem]:
    """Return problems of a Swin's or ConvNeXt's stages: lists of wrong lengths, or heads that do not divide widths."""
    if isinstance(config, ConvNextConfig) and not len(config.DEPTH) == len(config.DIMS) == 4:
        must = "must have four entries, as DIMS"
        return [Problem(f"{key}.DEPTH", str(list(config.DEPTH)), must, "Write DEPTH: [3, 3, 9, 3], say.")]
    if not isinstance(config, SwinConfig):
        return []
    if len(config.DEPTHS) != len(config.NUM_HEADS):
        must = f"must have as many entries as NUM_HEADS, {len(config.NUM_HEADS)}"
        return [Problem(f"{key}.DEPTHS", str(list(config.DEPTHS)), must, "Write both for each stage.")]
    for stage, heads in enumerate(config.NUM_HEADS):
        width = config.EMBED_DIM * 2**stage
        if width % heads:
            must = f"must divide the widths of the stages; stage {stage + 1} has {width}"
            return [Problem(f"{key}.NUM_HEADS", str(list(config.NUM_HEADS)), must, "Write [3, 6, 12, 24], say.")]
    return []


def anynet_problems(config: RegNetConfig, key: str) -> list[Problem]:
    """Check that all lists of stages are given and have the same length."""
    lengths = {name: len(getattr(config, name)) for name in ANYNET_PARAMETERS}
    if len(set(lengths.values())) == 1 and lengths["depths"]:
        return []
    must = f"must give {', '.join(ANYNET_PARAMETERS)}, an entry of each per stage"
    got = ", ".join(f"{count} {name}" for name, count in lengths.items())
    return [
        Problem(
            key, got, must, "Write depths: [2, 4, 11, 1], for example, and lists of the same length for the others."
        )
    ]


def trunk_component(name: str) -> str:
    """Return the registered trunk that builds ``name``: ``timm`` for ``timm/<model>``, else the name itself."""
    library = name.partition("/")[0]
    return library if library in _LIBRARIES else name


def trunk_params(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``MODEL.TRUNK.PARAMS`` with the model's name, which is part of the trunk's name."""
    library = trunk_component(name)
    return {**params, "name": name.removeprefix(f"{library}/")} if library in _LIBRARIES else dict(params)


def regnet_problems(config: RegNetConfig) -> list[Problem]:
    """Return problems of a RegNet's parameters; null parameters are not checked here."""
    key = "config.MODEL.TRUNK.REGNET"
    problems = list(constraint_problems(config, key))
    # Widths are rounded to multiples of 8, and the first block has exactly this one.
    if config.w_0 is not None and config.w_0 % 8:
        problems.append(Problem(f"{key}.w_0", str(config.w_0), "must be a multiple of 8", "Write 16, for example."))
    return problems


def trunk_block_names(name: str) -> list[str]:
    """Return the names of the blocks under ``MODEL.TRUNK`` that a trunk reads."""
    further = [FURTHER_BLOCKS[name]] if name in FURTHER_BLOCKS else []
    return [*further, TRUNK_BLOCKS.get(name, "PARAMS")]


def own_trunk_keys(trunk: Any, schema: type) -> dict[str, Any]:
    """Return the keys of a built-in trunk from its blocks.

    Args:
        trunk: the block ``MODEL.TRUNK``.
        schema: dataclass of the keys that the trunk's constructor takes.
    """
    keys: dict[str, Any] = {}
    for name in trunk_block_names(trunk.NAME):
        keys |= asdict(getattr(trunk, name))
    return declared_keys(keys, schema)
