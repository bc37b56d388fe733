"""The layers of each head, in order: those of the papers and of VISSL, with each option on and off."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.methods.swav import NormalizedPrototypes
from vissl_zero.registry import HEADS

DINO = {"in_dim": 8, "num_clusters": [9], "hidden_dim": 6, "bottleneck_dim": 4}
IBOT_DINO = {"in_dim": 8, "out_dim": 9, "hidden_dim": 6, "bottleneck_dim": 4}
MOBILE = {"in_channels": 8, "mid_channels": 6, "num_classes": 4, "drop_out": 0.25}
MSN = {"in_dim": 8, "num_prototypes": 9, "hidden_dim": 6, "output_dim": 4}
PIRL = {"dims": [8, 6, 4], "num_towers": 2}
SIAMESE = {"dims": [8, 6, 4], "predictor_dims": [3]}
SWAV = {"dims": [8, 6, 4], "num_clusters": [9, 7]}
VICREGL = {"dims": [8, 6, 4], "map_dims": [5, 3]}

# head, its options, its layers: "-" before one without bias or without weights of its own
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
    ("feature_maps", {}, ""),
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
    ("swav_head", SWAV, "Linear 8 6, ReLU, Linear 6 4, -Linear 4 9, -Linear 4 7"),
    ("swav_head", SWAV | {"use_bn": True}, "Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4, -Linear 4 9, -Linear 4 7"),
    (
        "swav_head",
        SWAV | {"use_bn": True, "use_bias": False, "skip_last_bn": False, "activation_name": "GELU"},
        "-Linear 8 6, BatchNorm1d 6, GELU, -Linear 6 4, BatchNorm1d 4, GELU, -Linear 4 9, -Linear 4 7",
    ),
    (
        "swav_head",
        SWAV | {"use_weight_norm_prototypes": True},
        "Linear 8 6, ReLU, Linear 6 4, NormalizedPrototypes 9 4, NormalizedPrototypes 7 4",
    ),
    ("dino_head", DINO, "Linear 8 6, GELU, Linear 6 6, GELU, Linear 6 4, NormalizedPrototypes 9 4"),
    (
        "dino_head",
        DINO | {"use_bn": True, "num_layers": 2},
        "Linear 8 6, BatchNorm1d 6, GELU, Linear 6 4, NormalizedPrototypes 9 4",
    ),
    ("dino_head", DINO | {"num_layers": 1}, "Linear 8 4, NormalizedPrototypes 9 4"),
    (
        "ibot_head",
        {"dims": [8, 4], "num_clusters": [9, 7]},
        "Linear 8 4, NormalizedPrototypes 9 4, Linear 8 4, NormalizedPrototypes 7 4",
    ),
    (
        "ibot_head",
        {"dims": [8, 6, 4], "num_clusters": [9]},
        "Linear 8 6, GELU, Linear 6 4, NormalizedPrototypes 9 4",
    ),
    (
        "dinov3_head",
        {"dims": [8, 6, 4], "num_clusters": [9], "activation_name": "ReLU"},
        "Linear 8 6, ReLU, Linear 6 4, NormalizedPrototypes 9 4",
    ),
    (
        "ibot_dino_head",
        IBOT_DINO | {"num_layers": 2},
        "Linear 8 6, GELU, Linear 6 4, NormalizedPrototypes 9 4, NormalizedPrototypes 9 4",
    ),
    (
        "ibot_dino_head",
        IBOT_DINO | {"patch_out_dim": 7},
        "Linear 8 6, GELU, Linear 6 6, GELU, Linear 6 4, NormalizedPrototypes 9 4, NormalizedPrototypes 7 4",
    ),
    (
        "ibot_dino_head",
        IBOT_DINO | {"shared_head": True, "num_layers": 1},
        "Linear 8 4, NormalizedPrototypes 9 4",
    ),
    ("msn_head", MSN, "Linear 8 6, GELU, Linear 6 6, GELU, Linear 6 4"),
    (
        "msn_head",
        MSN | {"use_bn": True},
        "Linear 8 6, BatchNorm1d 6, GELU, Linear 6 6, BatchNorm1d 6, GELU, Linear 6 4",
    ),
    ("siamese_concat_view", {"num_towers": 2}, ""),
    (
        "jigsaw_head",
        {"dims": [8, 4], "num_towers": 4, "num_permutations": 5},
        "Linear 8 4, ReLU, SiameseConcatView, Linear 16 5",
    ),
    ("jigsaw_head", {"dims": [8, 4]}, "Linear 8 4, ReLU, SiameseConcatView, Linear 36 1000"),
    # PIRL, section 3.2: an image and a tile are projected apart, then the tiles of an image together.
    ("pirl_head", PIRL, "Linear 8 6, ReLU, Linear 6 4, Linear 8 6, ReLU, Linear 6 4, SiameseConcatView, Linear 8 4"),
    (
        "pirl_head",
        {"dims": [8, 4], "of_image": [["mlp", {"dims": [8, 4]}]], "of_tiles": [["mlp", {"dims": [8, 4]}]]},
        "Linear 8 4, Identity, Identity, Linear 8 4",
    ),
    (
        "vicregl_head",
        VICREGL,
        "Linear 8 6, BatchNorm1d 6, ReLU, -Linear 6 4, Linear 8 5, BatchNorm1d 5, ReLU, -Linear 5 3",
    ),
    ("map_projection_head", {"dims": [8, 6, 4]}, "Linear 8 6, Linear 6 4, Linear 8 6, Linear 6 4"),
    (
        "map_projection_head",
        {"dims": [8, 6, 4], "use_bn": True, "use_relu": True},
        "Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4, Linear 8 6, BatchNorm1d 6, ReLU, Linear 6 4",
    ),
    ("fcn_head", {"dims": [8, 4]}, "Conv2d 8 4 1"),
    ("fcn_head", {"dims": [8, 6, 4]}, "-Conv2d 8 6 3, BatchNorm2d 6, ReLU, Conv2d 6 4 1"),
    ("fcn_head", {"dims": [8, 6, 4], "use_bn": False}, "Conv2d 8 6 3, ReLU, Conv2d 6 4 1"),
    ("pixel_head", {"dims": [8, 48]}, "Linear 8 48"),
    ("hog_head", {"dims": [8, 108]}, "Linear 8 108"),
    ("latent_head", {"dims": [8, 8]}, "Linear 8 8"),
]


def _layer(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{'' if module.bias is not None else '-'}{name} {module.in_features} {module.out_features}"
    if isinstance(module, nn.Conv2d):
        side = module.kernel_size[0]
        assert module.kernel_size == (side, side) and module.padding == (side // 2, side // 2)
        return f"{'' if module.bias is not None else '-'}{name} {module.in_channels} {module.out_channels} {side}"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return f"{'' if module.affine else '-'}{name} {module.num_features}"
    if isinstance(module, nn.Dropout):
        return f"{name} {module.p}"
    if isinstance(module, NormalizedPrototypes):
        return f"{name} {module.weight_v.shape[0]} {module.weight_v.shape[1]}"
    return name


@pytest.mark.parametrize(
    ("name", "options", "layers"), LAYERS, ids=[f"{at}-{name}" for at, (name, _, _) in enumerate(LAYERS)]
)
def test_a_head_has_these_layers(name: str, options: dict[str, Any], layers: str) -> None:
    head = HEADS.get(name).build(**options)
    leaves = [module for module in head.modules() if module is not head and not list(module.children())]
    assert ", ".join(map(_layer, leaves)) == layers


def test_each_head_is_listed() -> None:
    assert {name for name, _, _ in LAYERS} | {"chain", "patch_predictor"} >= set(HEADS.builtin())


# head, widths, what they must be
WIDTHS: list[tuple[str, list[int], str]] = [
    ("mlp", [8], "must have at least two widths"),
    *(("pixel_head", dims, "must have two widths") for dims in ([12], [8, 12, 12])),
    *(("hog_head", dims, "must ") for dims in ([8], [8, 9, 9])),
    *(("latent_head", dims, "must be the trunk's features, twice") for dims in ([8], [8, 9], [8, 8, 8])),
    *(("patch_predictor", dims, "must have three widths") for dims in ([8, 16], [8, 16, 8, 8])),
    *(("patch_predictor", [8, width, 8], "must be a multiple of 4 and of num_heads, 16") for width in (8, 24)),
]


@pytest.mark.parametrize(("name", "dims", "must"), WIDTHS)
def test_widths_that_make_no_head_are_refused(name: str, dims: list[int], must: str) -> None:
    with pytest.raises(ConfigError, match=must):
        HEADS.get(name).build(dims=dims)
