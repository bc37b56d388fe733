"""The layers of each head of methods, in order: those of the papers and of VISSL, with each option on and off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.head_layers import heads_in, layers_of
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HEADS

DINO = {"in_dim": 8, "num_clusters": [9], "hidden_dim": 6, "bottleneck_dim": 4}
IBOT_DINO = {"in_dim": 8, "out_dim": 9, "hidden_dim": 6, "bottleneck_dim": 4}
MSN = {"in_dim": 8, "num_prototypes": 9, "hidden_dim": 6, "output_dim": 4}
PIRL = {"dims": [8, 6, 4], "num_towers": 2}
SWAV = {"dims": [8, 6, 4], "num_clusters": [9, 7]}
VICREGL = {"dims": [8, 6, 4], "map_dims": [5, 3]}

# head, its options, its layers
LAYERS: list[tuple[str, dict[str, Any], str]] = [
    ("feature_maps", {}, ""),
    ("swav_head", SWAV, "Linear 8 6, ReLU, Linear 6 4, -Linear 4 9, -Linear 4 7"),
    ("swav_head", {"dims": [8, 4], "num_clusters": [1]}, "Linear 8 4, -Linear 4 1"),
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
    ("dino_head", DINO | {"num_clusters": [1], "num_layers": 1}, "Linear 8 4, NormalizedPrototypes 1 4"),
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


@pytest.mark.parametrize(
    ("name", "options", "layers"), LAYERS, ids=[f"{at}-{name}" for at, (name, _, _) in enumerate(LAYERS)]
)
def test_a_head_has_these_layers(name: str, options: dict[str, Any], layers: str) -> None:
    assert layers_of(HEADS.get(name).build(**options)) == layers


def test_each_head_is_listed() -> None:
    assert {name for name, _, _ in LAYERS} | {"patch_predictor"} == heads_in("vissl_zero.methods")


# head, widths, what they must be
WIDTHS: list[tuple[str, list[int], str]] = [
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


# head, what is wrong with its options, all that is said
OPTIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("swav_head", SWAV | {"dims": [8]}, ["dims of swav_head must have at least two widths"]),
    ("swav_head", SWAV | {"num_clusters": [9, 0]}, ["num_clusters of swav_head must be numbers of at least 1"]),
    ("swav_head", SWAV | {"activation_name": "relu"}, ["activation_name of swav_head must be one of ReLU, GELU"]),
    ("swav_head", {"dims": [8], "num_clusters": [0], "activation_name": "relu"}, ["dims", "num_clusters", "activ"]),
    *(
        ("dino_head", DINO | {"num_clusters": counts}, ["num_clusters of dino_head must have one number, at least 1"])
        for counts in ([], [0], [9, 7])
    ),
]


@pytest.mark.parametrize(("name", "options", "said"), OPTIONS)
def test_options_that_make_no_head_are_refused_together(name: str, options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        HEADS.get(name).build(**options)
    found = [problem.must for problem in raised.value.problems]
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found
