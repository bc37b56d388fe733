"""ResNet from torchvision's blocks (https://arxiv.org/abs/1512.03385), and SimCLR v2's with selective kernels.

Selective kernels: https://arxiv.org/abs/2006.10029, appendix A. In every block two 3x3 convolutions are mixed by
channel, with weights that a small network computes from the mean of both. The stem has three 3x3 convolutions, and
projections pool before they change the width. Layers and sizes follow
``vissl/models/trunks/resnext_selective_kernels.py`` at 09270ed2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from vissl_zero.config.components.trunks import ResNetConfig, ResNetSkConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.model import LayerTap, Unit
from vissl_zero.registry import TRUNKS

_EPS = 1e-5


class TorchFirstConv2d(nn.Conv2d):
    """A convolution with torch's initialization, uniform within 1 / sqrt(fan-in)."""

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        bound = 1 / math.sqrt(self.weight[0].numel())
        drawn = torch.empty(self.weight.shape).uniform_(-bound, bound, generator=generator_for("weight"))
        self.weight.data.copy_(drawn)


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters are normalized to mean 0 and standard deviation 1 in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x with standardized weights: (b, C, H, W) -> (b, C', H', W')."""
        centered = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        # eps under the root, and not added to it: the gradient is finite for a constant filter.
        scale = centered.square().mean(dim=(1, 2, 3), keepdim=True).add(_EPS**2).rsqrt()
        return self._conv_forward(x, centered * scale, self.bias)


class TorchFirstStandardizedConv2d(StandardizedConv2d, TorchFirstConv2d):
    """A standardized convolution with torch's initialization."""


def replace_convolutions(module: nn.Module, is_standardized: bool, is_torch_first: bool) -> None:
    """Change the class of every convolution in ``module``, in place; parameters and names do not change."""
    classes = {
        (False, False): nn.Conv2d,
        (True, False): StandardizedConv2d,
        (False, True): TorchFirstConv2d,
        (True, True): TorchFirstStandardizedConv2d,
    }
    for layer in module.modules():
        if type(layer) is nn.Conv2d:
            # The class alone: the blocks are torchvision's, which take no class of convolution.
            layer.__class__ = classes[is_standardized, is_torch_first]


class StagedTrunk(nn.Module):
    """A convolutional trunk in which the stem and every block are one unit each.

    Args:
        stem: first layers.
        stages: blocks of each stage, in order.
        feature_dim: channels of the last block, F.

    Attributes:
        stem: a Unit.
        stages: list of lists of Units.
        feature_dim: F.
    """

    def __init__(self, stem: Unit, stages: Sequence[Sequence[nn.Module]], feature_dim: int):
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList(nn.ModuleList(Unit(block) for block in stage) for stage in stages)
        self.feature_dim = feature_dim

    @property
    def map_dim(self) -> int:
        """Channels of the last stage."""
        return self.feature_dim

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        """Compute average-pooled features (b_r, F) of R image tensors (b_r, 3, H_r, W_r).

        Args:
            images: images of each resolution.
            return_maps: also return the maps (b_r, F, h_r, w_r) of the last stage, before the features.
        """
        xs: list[Tensor] = self.stem(images)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for unit in stage:
                xs = unit(xs)
        return [*(xs if return_maps else ()), *(x.mean(dim=(2, 3)) for x in xs)]

    tap_names = ("conv1", "res1", "res2", "res3", "res4", "res5", "res5avg", "avgpool", "flatten")

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's names: the stem (conv1), its pooled output (res1), the stages from res2, the pooled features.

        As in VISSL, conv1 of a ResNet is after its activation, and res5avg has shape (n, F, 1, 1).
        """
        last = {f"res{index}": f"stages.{index - 2}.{len(stage) - 1}" for index, stage in enumerate(self.stages, 2)}  # type: ignore[arg-type]
        if name in last:
            return LayerTap((last[name],))
        if name in ("res5avg", "avgpool"):
            return LayerTap((), lambda _, features: [x[:, :, None, None] for x in features])
        if name == "flatten":
            return LayerTap((), lambda _, features: features)
        if name == "res1":
            return LayerTap(("stem",))
        return LayerTap((self.conv1_path,)) if name == "conv1" else None

    conv1_path = "stem"


_KEY = "config.MODEL.TRUNK.RESNETS"


class _ZeroBasicBlock(BasicBlock):
    """A block that is the identity plus shortcut at the start (https://arxiv.org/abs/1706.02677, section 5.1)."""

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        nn.init.zeros_(self.bn2.weight)


class _ZeroBottleneck(Bottleneck):
    """A bottleneck with the initialization of ``_ZeroBasicBlock``."""

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        nn.init.zeros_(self.bn3.weight)


_BLOCKS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
    200: (Bottleneck, (3, 24, 36, 3)),
}
_NORMS = ("BatchNorm", "GroupNorm")
_STEMS = ("RES_STEM_IN", "RES_STEM_CIFAR")
_FIRST = ("torchvision", "vissl")


@TRUNKS.register("resnet", config=ResNetConfig)
class ResNet(StagedTrunk):
    """ResNet 18 to 200, by depth and width multiplier.

    Args:
        options: fields of ``ResNetConfig``.

    Raises:
        ConfigError: a key has a value that makes no ResNet.
    """

    conv1_path = "stem.2"  # before the pooling

    def __init__(self, **options: Any):
        config = ResNetConfig(**options)
        _check(config)
        norm: Callable[[int], nn.Module]
        norm = nn.BatchNorm2d if config.NORM == "BatchNorm" else partial(nn.GroupNorm, config.GROUPNORM_GROUPS)
        width = 64 * config.WIDTH_MULTIPLIER
        stages, feature_dim = _stages(config, width, norm)
        super().__init__(_stem(config, width, norm), stages, feature_dim)
        replace_convolutions(self, config.STANDARDIZE_CONVOLUTIONS, config.FIRST_WEIGHTS == "vissl")


def _check(config: ResNetConfig) -> None:
    problems = []
    choices = {"DEPTH": tuple(_BLOCKS), "NORM": _NORMS, "STEM_TYPE": _STEMS, "LAYER4_STRIDE": (1, 2)}
    for key, known in {**choices, "FIRST_WEIGHTS": _FIRST}.items():
        if getattr(config, key) not in known:
            must = f"must be one of {', '.join(map(str, known))}"
            problems.append(Problem(f"{_KEY}.{key}", repr(getattr(config, key)), must, "Choose one of them."))
    if config.DEPTH in (18, 34) and (config.GROUPS, config.WIDTH_PER_GROUP) != (1, 64):
        got = f"GROUPS {config.GROUPS}, WIDTH_PER_GROUP {config.WIDTH_PER_GROUP}"
        must = "depths 18 and 34 have neither groups nor another width per group"
        problems.append(Problem(f"{_KEY}.DEPTH", got, must, "Set them to 1 and 64, or take depth 50 or more."))
    if problems:
        raise ConfigError(problems)


def _stem(config: ResNetConfig, width: int, norm: Callable[[int], nn.Module]) -> Unit:
    """Build a 7x7 convolution with max pooling, or for images under 64 pixels a 3x3 convolution with stride 1."""
    if config.STEM_TYPE == "RES_STEM_CIFAR":
        return Unit(nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True))
    conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    return Unit(conv, norm(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def _stages(config: ResNetConfig, width: int, norm: Callable[[int], nn.Module]) -> tuple[list[list[nn.Module]], int]:
    """Build the blocks of the four stages; return them and the channels of the last block."""
    block_class, depths = _BLOCKS[config.DEPTH]
    if config.ZERO_INIT_RESIDUAL:
        block_class = _ZeroBasicBlock if block_class is BasicBlock else _ZeroBottleneck
    stages: list[list[nn.Module]] = []
    channels = width
    for index, (depth, stride) in enumerate(zip(depths, (1, 2, 2, config.LAYER4_STRIDE), strict=True)):
        planes = width * 2**index
        stage: list[nn.Module] = []
        for block_index in range(depth):
            block_stride = stride if block_index == 0 else 1
            out_channels = planes * block_class.expansion
            shortcut = None
            if block_stride != 1 or channels != out_channels:
                conv = nn.Conv2d(channels, out_channels, 1, stride=block_stride, bias=False)
                shortcut = nn.Sequential(conv, norm(out_channels))
            stage.append(
                block_class(
                    channels, planes, block_stride, shortcut, config.GROUPS, config.WIDTH_PER_GROUP, norm_layer=norm
                )
            )
            channels = out_channels
        stages.append(stage)
    return stages, channels


_SK_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4
_LEAST_MIXING = 32  # smallest width of the mixing network


@TRUNKS.register("resnet_sk", config=ResNetSkConfig)
def build_resnet_sk(**options: Any) -> nn.Module:
    """Build SimCLR v2's ResNet with selective kernels, by depth, width multiplier and ratio.

    Args: the fields of ``ResNetSkConfig``.
    """
    from vissl_zero.models.trunks.timm_trunk import TimmTrunk  # timm takes half a second to import

    build = partial(_net, ResNetSkConfig(**options))
    return TimmTrunk(build(), build)


def _net(config: ResNetSkConfig) -> nn.Sequential:
    width, ratio = 64 * config.WIDTH_MULTIPLIER, config.SK_RATIO
    stages: list[nn.Module] = [_sk_stem(width, ratio)]
    channels = width
    for index, depth in enumerate(_SK_BLOCKS[config.DEPTH]):
        inner = width * 2**index
        blocks: list[nn.Module] = [_Bottleneck(channels, inner, 1 if index == 0 else 2, ratio, is_first=True)]
        channels = inner * _EXPANSION
        blocks += [_Bottleneck(channels, inner, 1, ratio) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _conv(channels_in: int, channels_out: int, side: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, side, stride, (side - 1) // 2, bias=False)


def _norm(channels: int, has_relu: bool = True) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU() if has_relu else nn.Identity())


def _sk_stem(width: int, ratio: float) -> nn.Sequential:
    half = width // 2
    layers: list[nn.Module] = [_conv(3, width, 7, 2)]
    # As in SimCLR v2's code: ResNet-D's stem of three 3x3 convolutions (https://arxiv.org/abs/1812.01187) comes with
    # selective kernels, and so does its pooling in shortcuts.
    if ratio > 0:
        layers = [_conv(3, half, stride=2), _norm(half), _conv(half, half), _norm(half), _conv(half, width)]
    return nn.Sequential(*layers, _norm(width), nn.MaxPool2d(3, stride=2, padding=1))


class _SelectiveKernel(nn.Module):
    """Two 3x3 convolutions, mixed by channel."""

    def __init__(self, channels: int, stride: int, ratio: float):
        super().__init__()
        self.main_conv = nn.Sequential(_conv(channels, 2 * channels, stride=stride), _norm(2 * channels))
        mixing = max(int(channels * ratio), _LEAST_MIXING)
        self.mixing_conv = nn.Sequential(_conv(channels, mixing, 1), _norm(mixing), _conv(mixing, 2 * channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (n, C, H, W) -> (n, C, H / stride, W / stride)."""
        both = self.main_conv(x).unflatten(1, (2, -1))
        shares = self.mixing_conv(both.sum(dim=1).mean(dim=(2, 3), keepdim=True)).unflatten(1, (2, -1)).softmax(dim=1)
        return torch.sum(both * shares, dim=1)


class _Bottleneck(nn.Module):
    """A bottleneck: 1x1, selective (or plain) 3x3, 1x1 convolution, and a shortcut."""

    def __init__(self, channels_in: int, inner: int, stride: int, ratio: float, is_first: bool = False):
        super().__init__()
        outer = inner * _EXPANSION
        self.projection = _projection(channels_in, outer, stride, ratio) if is_first else nn.Identity()
        middle: list[nn.Module] = [_SelectiveKernel(inner, stride, ratio)]
        if ratio == 0:
            middle = [_conv(inner, inner, stride=stride), _norm(inner)]
        self.net = nn.Sequential(
            _conv(channels_in, inner, 1), _norm(inner), *middle, _conv(inner, outer, 1), _norm(outer, has_relu=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (n, C, H, W) -> (n, 4 inner, H / stride, W / stride)."""
        return torch.relu(self.projection(x) + self.net(x))


def _projection(channels_in: int, channels_out: int, stride: int, ratio: float) -> nn.Sequential:
    if ratio == 0:
        return nn.Sequential(_conv(channels_in, channels_out, 1, stride), _norm(channels_out, has_relu=False))
    # Padded at the right and bottom, so that 2x2 pooling keeps the size at stride 1 and covers odd sides at stride 2.
    pool = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.AvgPool2d(2, stride), _conv(channels_in, channels_out, 1))
    return nn.Sequential(pool, _norm(channels_out, has_relu=False))
