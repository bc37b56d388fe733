"""SimCLR v2's ResNet with selective kernels (https://arxiv.org/abs/2006.10029, appendix A; kernels as in VISSL).

In every block two 3x3 convolutions are mixed channel by channel, with weights that a small network finds from the mean
of both. The first convolution is three of 3x3, and projections pool before they change the width. Layers
and sizes are those of ``vissl/models/trunks/resnext_selective_kernels.py`` at 09270ed2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.trunks import ResNetSkConfig
from vissl_zero.models.trunks.timm_trunk import TimmTrunk
from vissl_zero.registry import TRUNKS

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4
_LEAST_MIXING = 32  # channels of the network that mixes


@TRUNKS.register("resnet_sk", config=ResNetSkConfig)
def build_resnet_sk(**options: Any) -> nn.Module:
    """SimCLR v2's ResNet with selective kernels, by depth, width multiplier and ratio.

    Args: the fields of ``ResNetSkConfig``.
    """
    build = partial(_net, ResNetSkConfig(**options))
    return TimmTrunk(build(), build)


def _net(config: ResNetSkConfig) -> nn.Sequential:
    width, ratio = 64 * config.WIDTH_MULTIPLIER, config.SK_RATIO
    stages: list[nn.Module] = [_stem(width, ratio)]
    channels = width
    for index, depth in enumerate(_BLOCKS[config.DEPTH]):
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


def _stem(width: int, ratio: float) -> nn.Sequential:
    half = width // 2
    layers: list[nn.Module] = [_conv(3, width, 7, 2)]
    if ratio > 0:
        layers = [_conv(3, half, stride=2), _norm(half), _conv(half, half), _norm(half), _conv(half, width)]
    return nn.Sequential(*layers, _norm(width), nn.MaxPool2d(3, stride=2, padding=1))


class _SelectiveKernel(nn.Module):
    """Two 3x3 convolutions mixed by channel."""

    def __init__(self, channels: int, stride: int, ratio: float):
        super().__init__()
        self.main_conv = nn.Sequential(_conv(channels, 2 * channels, stride=stride), _norm(2 * channels))
        mixing = max(int(channels * ratio), _LEAST_MIXING)
        self.mixing_conv = nn.Sequential(_conv(channels, mixing, 1), _norm(mixing), _conv(mixing, 2 * channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(n, C, H, W) -> (n, C, H / stride, W / stride)."""
        both = self.main_conv(x).unflatten(1, (2, -1))
        shares = self.mixing_conv(both.sum(dim=1).mean(dim=(2, 3), keepdim=True)).unflatten(1, (2, -1)).softmax(dim=1)
        return torch.sum(both * shares, dim=1)


class _Bottleneck(nn.Module):
    """1x1, selective (or plain) 3x3, 1x1, and a shortcut around them."""

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
        """(n, C, H, W) -> (n, 4 inner, H / stride, W / stride)."""
        return torch.relu(self.projection(x) + self.net(x))


def _projection(channels_in: int, channels_out: int, stride: int, ratio: float) -> nn.Sequential:
    if ratio == 0:
        return nn.Sequential(_conv(channels_in, channels_out, 1, stride), _norm(channels_out, has_relu=False))
    pool = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.AvgPool2d(2, stride), _conv(channels_in, channels_out, 1))
    return nn.Sequential(pool, _norm(channels_out, has_relu=False))
