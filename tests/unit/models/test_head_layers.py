"""The layers of each head of models, in order: those of VISSL, with each option on and off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.head_layers import heads_in, layers_of
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HEADS

MOBILE = {"in_channels": 8, "mid_channels": 6, "num_classes": 4, "drop_out": 0.25}
SIAMESE = {"dims": [8, 6, 4], "predictor_dims": [3]}

# head, its options, its layers
LAYERS: list[tuple[str, dict[str, Any], str]] = [
    ("mlp", {"dims": [8, 6, 4]}, "Linear 8 6, Linear 6 4"),
    ("mlp", {"dims": [8, 6, 4], "use_bias": False}, "-Linear 8 6, -Linear 6 4"),
    (
        "mlp",
        {"dims": [8, 6, 4], "use_bn": True, "use_relu": True, "use_dropout": True, "dropout_rate": 0.25},
        "Linear 8 6, BatchNorm1d 6, ReLU, Dropout 0.25, Linear 6 4",
    ),
    (
        "mlp",
        {"dims": [8, 4], "use_bn": True, "use_relu": True, "use_dropout": True, "skip_last_layer_relu_bn": False},
        "Linear 8 4, BatchNorm1d 4, ReLU, Dropout 0.5",
    ),
    ("eval_mlp", {"in_channels": 2, "dims": [8, 6, 4]}, "BatchNorm2d 2, Linear 8 6, Linear 6 4"),
    (
        "eval_mlp",
        {"in_channels": 2, "dims": [8, 6, 4], "use_bn": True, "use_relu": True},
        "BatchNorm2d 2, Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4",
    ),
    ("identity", {}, ""),
    ("mobilenet_v3_head", MOBILE, "Linear 8 6, Hardswish, Dropout 0.25, Linear 6 4"),
    (
        "mobilenet_v3_head",
        MOBILE | {"with_bn": True},
        "BatchNorm2d 8, Linear 8 6, Hardswish, Dropout 0.25, Linear 6 4",
    ),
    ("mobilenet_v3_head_timm", MOBILE, "Conv2d 8 6 1, Hardswish, Flatten, Dropout 0.25, Linear 6 4"),
    ("vision_transformer_head", {"in_plane": 8, "num_classes": 4}, "Linear 8 4"),
    ("vision_transformer_head", {"in_plane": 8, "num_classes": 4, "hidden_dim": 6}, "Linear 8 6, Tanh, Linear 6 4"),
    # A bias before a batch norm has no effect; the last norm has no weights: SimSiam and BYOL, moco-v3.
    (
        "siamese_head",
        SIAMESE,
        "-Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4, -Linear 4 3, BatchNorm1d 3, ReLU, Linear 3 4",
    ),
    ("siamese_head", SIAMESE | {"use_bn": False}, "Linear 8 6, ReLU, Linear 6 4, Linear 4 3, ReLU, Linear 3 4"),
    (
        "siamese_head",
        SIAMESE | {"projector_last_bn": True},
        "-Linear 8 6, BatchNorm1d 6, ReLU, -Linear 6 4, -BatchNorm1d 4, -Linear 4 3, BatchNorm1d 3, ReLU, Linear 3 4",
    ),
    (
        "siamese_head",
        SIAMESE | {"predictor_last_bn": True},
        "-Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4, -Linear 4 3, BatchNorm1d 3, ReLU, -Linear 3 4, -BatchNorm1d 4",
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "layers"), LAYERS, ids=[f"{at}-{name}" for at, (name, _, _) in enumerate(LAYERS)]
)
def test_a_head_has_these_layers(name: str, options: dict[str, Any], layers: str) -> None:
    assert layers_of(HEADS.get(name).build(**options)) == layers


def test_each_head_is_listed() -> None:
    assert {name for name, _, _ in LAYERS} | {"chain"} == heads_in("vissl_zero.models")


def test_widths_that_make_no_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have at least two widths"):
        HEADS.get("mlp").build(dims=[8])
