"""The last maps of every family of trunks: where they come from, and that features stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.blocks import model_block
from vissl_zero.config.components.trunks import trunk_params
from vissl_zero.errors import ConfigError
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import Model, build_model

VIT = {"IMAGE_SIZE": 32, "PATCH_SIZE": 8, "NUM_LAYERS": 1, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 12}
REGNET = {"depth": 3, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "stem_width": 8}
# Trunk, channels and side of its maps of 64 pixels.
TRUNKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "regnet": ({"NAME": "regnet", "REGNET": REGNET}, 32, 4),
    "resnet": ({"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, 512, 2),
    "vit": ({"NAME": "vision_transformer", "VISION_TRANSFORMERS": {**VIT, "NUM_REGISTERS": 2}}, 8, 8),
    "resnet of timm": ({"NAME": "timm/resnet18"}, 512, 2),
    "efficientnet": ({"NAME": "timm/efficientnet_b0"}, 1280, 2),
    "mobilenet": ({"NAME": "mobilenetv3_timm", "MOBILE_NET": {"NAME": "mobilenetv3_large_100"}}, 960, 2),
    "convnext": ({"NAME": "timm/convnext_atto"}, 320, 2),
    "swin": (
        {
            "NAME": "timm/swin_tiny_patch4_window7_224",
            "PARAMS": {"model_args": {"img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 2)}},
        },
        192,
        8,
    ),
    "xcit": (
        {
            "NAME": "timm/xcit_nano_12_p16_224",
            "PARAMS": {"model_args": {"depth": 1, "embed_dim": 8, "num_heads": 2}},
        },
        8,
        4,
    ),
    "beit": (
        {
            "NAME": "beit",
            "BEIT": {"IMAGE_SIZE": 64, "PATCH_SIZE": 16, "NUM_LAYERS": 1, "NUM_HEADS": 2, "HIDDEN_DIM": 8},
        },
        8,
        4,
    ),
    "torchvision": ({"NAME": "torchvision/resnet18"}, 512, 2),
}


def _model(trunk: dict[str, Any]) -> Model:
    trunk = {**trunk, "PARAMS": trunk_params(trunk["NAME"], trunk.get("PARAMS", {}))}
    model = build_model(model_block({"TRUNK": trunk, "HEAD": {"PARAMS": [["fcn_head", {"dims": [-1, -1]}]]}}), 3)
    initialize_(model, 0)
    return model.eval()


@pytest.mark.parametrize("name", TRUNKS)
def test_a_head_is_given_the_last_maps(name: str) -> None:
    trunk, channels, side = TRUNKS[name]
    model = _model(trunk)
    assert model.trunk.map_dim == channels
    images = [torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        maps, features = model.trunk(images, return_maps=True)
        assert maps.shape == (2, channels, side, side)
        (plain,) = model(images, features_only=True)
        assert torch.equal(features, plain)
        (logits,) = model(images)
        assert torch.equal(logits, model.heads[0](features, [maps]))


def test_a_vision_transformers_maps_are_the_patches_in_their_places() -> None:
    model = _model(TRUNKS["vit"][0])
    images = [torch.randn(2, 3, 16, 32)]
    with torch.no_grad():
        maps, _ = model.trunk(images, return_maps=True)
        (tokens,) = model.trunk(images, return_tokens=True)
    assert maps.shape == (2, 8, 2, 4)
    assert torch.equal(maps[:, :, 1, 3], tokens[:, model.trunk.num_prefix_tokens + 7])


def test_a_trunk_without_maps_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a trunk with maps"):
        _model({"NAME": "timm/mixer_s32_224"})
