"""The AlexNets of VISSL's model zoo, with VISSL's layers and names.

They differ in groups, norms, strides and the input that they derive from an image. Layers follow
``vissl/models/trunks/alexnet_*.py`` at 09270ed2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vissl_zero.config.components.trunks import NoKeys
from vissl_zero.models.model import LayerTap
from vissl_zero.models.trunks.timm_trunk import TimmTrunk
from vissl_zero.registry import TRUNKS

# Side of the images, in pixels, for the width of the flat feature: unpadded and padded first convolutions.
_UNPADDED_SIDE, _PADDED_SIDE = 227, 224
_LAYERS = ("conv1", "pool1", "conv2", "pool2", "conv3", "conv4", "conv5", "pool5", "flatten")


class AlexNetTrunk(TimmTrunk):
    """An AlexNet whose feature is the flat output of the last pooling; all images must have one size.

    Args:
        build: builds the named layers.
    """

    tap_names = _LAYERS

    def __init__(self, build: Callable[[], nn.Module]):
        super().__init__(build(), build)

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's names: conv1 to conv5 after norm and ReLU, pool1, pool2, pool5, flatten."""
        return LayerTap((self.last_link(name),)) if name in _LAYERS else None


class _Sobel(nn.Module):
    """Sobel gradients of the mean of colors, along both sides: the input of DeepCluster's AlexNet. Not trained."""

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        slope = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
        self.register_buffer("filters", torch.stack([slope, slope.t()])[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute slopes, (n, 3, H, W) -> (n, 2, H, W)."""
        return functional.conv2d(x.mean(dim=1, keepdim=True), self.filters.to(x.dtype), padding=1)


class _Lightness(nn.Module):
    """The first channel of a Lab image."""

    def forward(self, x: Tensor) -> Tensor:
        """Select the lightness, (n, 3, H, W) -> (n, 1, H, W)."""
        return x[:, :1]


def _conv(channels_in: int, channels_out: int, side: int, norm: bool, **options: Any) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, side, **options)]
    layers += [nn.BatchNorm2d(channels_out)] if norm else []
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


def _pool(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(*norms, nn.MaxPool2d(3, stride=2)) if norms else nn.MaxPool2d(3, stride=2)


def _response_norm() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)


def _net(convs: list[nn.Module], pools: list[nn.Module], sight: nn.Module | None = None) -> nn.Module:
    first: Any = convs[0]
    # The side that the first convolution was trained with. Flat features fit this side alone.
    side = _PADDED_SIDE if first[0].padding[0] else _UNPADDED_SIDE
    conv1, conv2, conv3, conv4, conv5 = convs
    layers = (conv1, pools[0], conv2, pools[1], conv3, conv4, conv5, pools[2], nn.Flatten())
    named: list[tuple[str, nn.Module]] = [("sight", sight)] if sight is not None else []
    net = nn.Sequential(OrderedDict([*named, *zip(_LAYERS, layers, strict=True)]))
    net.pretrained_cfg = {"input_size": (3, side, side), "fixed_input_size": True}  # type: ignore[assignment]
    return net


def _bvlc() -> nn.Module:
    return _net(_grouped(3, [False] * 5, stride=4), [_pool(_response_norm()), _pool(_response_norm()), _pool()])


def _jigsaw() -> nn.Module:
    pools = [nn.Sequential(_pool(), _response_norm()), nn.Sequential(_pool(), _response_norm()), _pool()]
    return _net(_grouped(3, [False, False, True, True, True], stride=2), pools)


def _colorization() -> nn.Module:
    return _net(_grouped(1, [True] * 5, stride=4), [_pool(), _pool(), _pool()], _Lightness())


def _grouped(channels: int, norms: list[bool], stride: int) -> list[nn.Module]:
    """Build convolutions of the AlexNet split over two GPUs: groups in the second, fourth and fifth."""
    widths = [(channels, 96), (96, 256), (256, 384), (384, 384), (384, 256)]
    sides = [(11, {"stride": stride}), (5, {"padding": 2, "groups": 2}), (3, {"padding": 1})]
    sides += [(3, {"padding": 1, "groups": 2})] * 2
    return [
        _conv(*width, side, norm, **options) for width, (side, options), norm in zip(widths, sides, norms, strict=True)
    ]


def _whole(widths: list[tuple[int, int]]) -> list[nn.Module]:
    """Build convolutions in one group, each with batch norm."""
    sides = [(11, {"stride": 4, "padding": 2}), (5, {"padding": 2}), *[(3, {"padding": 1})] * 3]
    return [_conv(*width, side, True, **options) for width, (side, options) in zip(widths, sides, strict=True)]


def _deepcluster() -> nn.Module:
    widths = [(2, 96), (96, 256), (256, 384), (384, 384), (384, 256)]
    return _net(_whole(widths), [_pool(), _pool(), _pool()], _Sobel())


def _rotnet() -> nn.Module:
    widths = [(3, 64), (64, 192), (192, 384), (384, 256), (256, 256)]
    return _net(_whole(widths), [_pool(), _pool(), _pool()])


@TRUNKS.register("alexnet_bvlc", config=NoKeys)
def build_bvlc() -> nn.Module:
    """Build AlexNet as Caffe's BVLC has it."""
    return AlexNetTrunk(_bvlc)


@TRUNKS.register("alexnet_colorization", config=NoKeys)
def build_colorization() -> nn.Module:
    """Build AlexNet of the colorization paper, on the lightness of Lab images."""
    return AlexNetTrunk(_colorization)


@TRUNKS.register("alexnet_deepcluster", config=NoKeys)
def build_deepcluster() -> nn.Module:
    """Build AlexNet of DeepCluster, on Sobel slopes."""
    return AlexNetTrunk(_deepcluster)


@TRUNKS.register("alexnet_jigsaw", config=NoKeys)
def build_jigsaw() -> nn.Module:
    """Build AlexNet of the jigsaw paper, with stride 2."""
    return AlexNetTrunk(_jigsaw)


@TRUNKS.register("alexnet_rotnet", config=NoKeys)
def build_rotnet() -> nn.Module:
    """Build AlexNet of RotNet."""
    return AlexNetTrunk(_rotnet)
