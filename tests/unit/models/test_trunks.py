"""Trunks compute what the models of the libraries compute, keep parameters in units, and take small images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vissl_zero  # noqa: F401  (before torchvision)

# isort: split
import torchvision
from classy_vision.models import MODEL_REGISTRY

from vissl_zero.errors import ConfigError
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import Unit
from vissl_zero.models.trunks.regnet import RegNet
from vissl_zero.models.trunks.resnet import ResNet, StandardizedConv2d

TINY: dict[str, Any] = {"depth": 4, "w_0": 16, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "stem_width": 8}


def _images(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, 3, size, size, generator=generator) for size in sizes]


def _copy_by_order(source: nn.Module, target: nn.Module) -> None:
    """Weights by position: the names differ, the order of blocks does not."""
    values = list(source.state_dict().values())
    with torch.no_grad():
        for tensor, value in zip(target.state_dict().values(), values, strict=True):
            assert tensor.shape == value.shape
            tensor.copy_(value)


@pytest.mark.parametrize("name", ["regnet_y_400mf", "regnet_x_400mf"])
def test_regnet_is_classy_visions(name: str) -> None:
    theirs = MODEL_REGISTRY[name]().eval()
    ours = RegNet(name=name).eval()
    _copy_by_order(theirs, ours)
    (image,) = _images(40)
    expected = theirs.trunk_output(theirs.stem(image)).mean(dim=(2, 3))
    torch.testing.assert_close(ours([image])[0], expected)


def test_regnet_y_400mf_has_its_published_size() -> None:
    trunk = RegNet(name="regnet_y_400mf")
    assert trunk.feature_dim == 440
    assert sum(p.numel() for p in trunk.parameters()) == 4_344_144 - 1_000 * 441  # published, less the classifier
    assert [len(stage) for stage in trunk.stages] == [1, 3, 6, 6]  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [18, 50])
def test_resnet_is_torchvisions(depth: int) -> None:
    theirs = getattr(torchvision.models, f"resnet{depth}")(weights=None).eval()
    theirs.fc = nn.Identity()
    ours = ResNet(DEPTH=depth).eval()
    _copy_by_order(theirs, ours)
    (image,) = _images(40)
    torch.testing.assert_close(ours([image])[0], theirs(image))


def test_the_stem_for_small_images_is_one_convolution_of_full_resolution() -> None:
    """As for CIFAR in https://arxiv.org/abs/2002.05709, B.9: 3x3, stride 1, no pooling."""
    conv, norm, _ = stem = ResNet(DEPTH=18, STEM_TYPE="RES_STEM_CIFAR").stem
    assert [type(layer).__name__ for layer in stem] == ["Conv2d", "BatchNorm2d", "ReLU"] and norm.num_features == 64
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (3, 64, (3, 3))
    assert (conv.stride, conv.padding, conv.bias) == ((1, 1), (1, 1), None)


def test_resnet_width_groups_and_stride() -> None:
    wide = ResNet(DEPTH=50, WIDTH_MULTIPLIER=2, STEM_TYPE="RES_STEM_CIFAR")
    assert wide.feature_dim == 4096
    theirs = torchvision.models.resnext50_32x4d(weights=None)
    theirs.fc = nn.Identity()
    _copy_by_order(theirs, ResNet(DEPTH=50, GROUPS=32, WIDTH_PER_GROUP=4))
    grids = []
    for stride in (1, 2):
        trunk = ResNet(DEPTH=18, LAYER4_STRIDE=stride)
        xs = trunk.stem(_images(64))
        for stage in trunk.stages:
            for unit in stage:  # type: ignore[union-attr]
                xs = unit(xs)
        grids.append(tuple(xs[0].shape[2:]))
    assert grids == [(4, 4), (2, 2)]


@pytest.mark.parametrize(
    "trunk",
    [
        RegNet(**TINY),
        RegNet(**TINY, stem_type="res_stem_cifar"),
        RegNet(**TINY, activation_type="SILU", use_se=False, block_type="RES_BASIC_BLOCK"),
        ResNet(DEPTH=18, STEM_TYPE="RES_STEM_CIFAR"),
        ResNet(DEPTH=18, NORM="GroupNorm", STANDARDIZE_CONVOLUTIONS=True, STEM_TYPE="RES_STEM_CIFAR"),
    ],
    ids=["regnet", "regnet-cifar", "regnet-silu", "resnet-cifar", "resnet-group-norm"],
)
def test_small_images_and_units(trunk: Any) -> None:
    initialize_(trunk, 0)
    features = trunk(_images(12, 8, 32))
    assert [tuple(f.shape) for f in features] == [(2, trunk.feature_dim)] * 3
    assert all(f.isfinite().all() for f in features)
    in_units = {id(p) for module in trunk.modules() if isinstance(module, Unit) for p in module.parameters()}
    assert in_units == {id(p) for p in trunk.parameters()}
    torch.cat(features).square().sum().backward()
    assert all(p.grad is not None for p in trunk.parameters())


def test_group_norm_means_no_batch_norm() -> None:
    trunk = ResNet(DEPTH=18, NORM="GroupNorm", GROUPNORM_GROUPS=16)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in trunk.modules())
    assert {m.num_groups for m in trunk.modules() if isinstance(m, nn.GroupNorm)} == {16}


def test_standardized_convolution_ignores_shift_and_scale_of_its_filters() -> None:
    conv = StandardizedConv2d(3, 4, 3).double()
    x = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(3.0).add_(7.0)
    torch.testing.assert_close(conv(x), before, rtol=1e-6, atol=1e-8)
    weight = conv.weight - conv.weight.mean(dim=(1, 2, 3), keepdim=True)
    weight = weight / weight.flatten(1).std(dim=1, correction=0).view(4, 1, 1, 1)
    torch.testing.assert_close(conv(x), nn.functional.conv2d(x, weight, conv.bias), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RegNet(name="regnet_y_40mf"), r"REGNET.name: must name a published RegNet.*'regnet_y_400mf'"),
        (lambda: RegNet(name="regnet_y_400mf", depth=3), r"decides the architecture by itself.*Leave out depth"),
        (lambda: RegNet(name="regnet_y_400mf", use_se=False), r"Leave out use_se"),
        (lambda: RegNet(depth=3), r"REGNET: lacks w_0, w_a, w_m, group_width"),
        (lambda: RegNet(**{**TINY, "w_0": 17}), r"w_0: must be a multiple of 8 \(got 17\)"),
        (lambda: RegNet(**TINY, stem_type="STEM"), r"stem_type: must be one of .*RES_STEM_CIFAR"),
        (lambda: ResNet(DEPTH=20), r"RESNETS.DEPTH: must be one of 18, 34, 50, 101, 152, 200 \(got 20\)"),
        (lambda: ResNet(DEPTH=18, GROUPS=2), r"depths 18 and 34 have neither groups"),
        (lambda: ResNet(NORM="LayerNorm"), r"RESNETS.NORM: must be one of BatchNorm, GroupNorm"),
    ],
)
def test_what_makes_no_trunk_is_refused_with_the_way_out(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
