"""A component's own keys against its dataclass, and the sizes and layers that make no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import MISSING

from tests.unit.config.example_config import config
from vissl_zero.config.blocks.model_and_loss import Trunk
from vissl_zero.config.components import heads, typed_options
from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvNextConfig,
    RegNetConfig,
    ResNetConfig,
    SwinConfig,
    VisionTransformerConfig,
    patch_side,
    regnet_problems,
    size_problems,
    vision_transformer_problems,
)
from vissl_zero.errors import ConfigError
from vissl_zero.registry import Component


@dataclass
class Inner:
    length: int = 3


@dataclass
class Keys:
    width: int = 1
    names: list[str] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("width must be at least 1")


COMPONENT = Component("thing", Keys, Keys, "")


def test_defaults_are_filled_in_and_types_converted():
    given = {"width": "4", "inner": {"length": 5}}
    assert typed_options(COMPONENT, given, "config.X") == {"width": 4, "names": [], "inner": {"length": 5}}


def test_a_text_in_dollars_is_replaced() -> None:
    assert typed_options(COMPONENT, {"width": 4, "names": ["${width}"]}, "config.X")["names"] == ["4"]


def test_every_wrong_key_is_a_problem():
    with pytest.raises(ConfigError) as caught:
        typed_options(COMPONENT, {"widht": 4, "names": 3, "inner": {"len": 1}}, "config.X")
    assert str(caught.value).split("\n") == [
        "config.X.widht: is not a key. Did you mean 'width'?",
        "config.X.names: must be a list. Write config.X.names=[3].",
        "config.X.inner.len: is not a key. Did you mean 'length'?",
    ]


def test_a_dataclass_checks_its_own_ranges():
    with pytest.raises(ConfigError, match=r"config\.X: width must be at least 1"):
        typed_options(COMPONENT, {"width": 0}, "config.X")


def test_a_component_without_keys_takes_none():
    assert typed_options(None, {}, "config.X") == {}
    with pytest.raises(ConfigError, match=r"declares no keys .*Leave them out \(~config\.X\.a on the command line\)"):
        typed_options(None, {"a": 1}, "config.X")


@dataclass
class Blocks:
    stages: list[Inner] = field(default_factory=list)


def test_a_wrong_key_in_a_list_of_blocks_is_named_with_its_place():
    with pytest.raises(ConfigError) as caught:
        typed_options(Blocks, {"stages": [{"length": 1}, {"lenght": 2}, 3, {"length": "x"}]}, "config.X")
    assert str(caught.value).split("\n") == [
        "config.X.stages[1].lenght: is not a key. Did you mean 'length'?",
        "config.X.stages[2]: must be a block of keys (got 3). Known: length.",
        "config.X.stages[3].length: must be a whole number (got 'x'). Correct the value of config.X.stages[3].length.",
    ]


@dataclass
class Needed:
    size: int = MISSING
    title: str = MISSING


def test_a_key_without_a_default_must_be_given() -> None:
    assert typed_options(Needed, {"size": 1, "title": "a"}, "config.X") == {"size": 1, "title": "a"}
    with pytest.raises(ConfigError) as caught:
        typed_options(Needed, {"size": "wide", "qq": 1}, "config.X")
    assert str(caught.value).split("\n") == [
        "config.X.qq: is not a key. Known: size, title.",
        "config.X.size: must be a whole number (got 'wide'). Correct the value of config.X.size.",
        "config.X.title: must be given. Add it to the recipe.",  # and not the size again, which is given
    ]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (ResNetConfig(), ""),
        (VisionTransformerConfig(HIDDEN_DIM=8, NUM_HEADS=2, IMAGE_SIZE=12, PATCH_SIZE=4), ""),
        (BeitConfig(HIDDEN_DIM=8, NUM_HEADS=3), "K.HIDDEN_DIM: must be a multiple of NUM_HEADS, 3 (got 8)."),
        (BeitConfig(IMAGE_SIZE=9, PATCH_SIZE=4), "K.IMAGE_SIZE: must be a multiple of PATCH_SIZE, 4 (got 9)."),
        (BeitConfig(HIDDEN_DIM=8, NUM_HEADS=0), "K.NUM_HEADS: must be at least 1 (got 0)."),
        (ConvNextConfig(), ""),
        *(
            (ConvNextConfig(DEPTH=depth, DIMS=dims), f"K.DEPTH: must have four entries, as DIMS (got {depth}).")
            for depth, dims in (([1, 2], [8] * 4), ([1] * 4, [8] * 3), ([1] * 3, [8] * 3), ([1] * 5, [8] * 5))
        ),
        (SwinConfig(EMBED_DIM=6, DEPTHS=[1] * 4, NUM_HEADS=[3, 4, 8, 16]), ""),
        (SwinConfig(DEPTHS=[2, 2]), "K.DEPTHS: must have as many entries as NUM_HEADS, 4 (got [2, 2])."),
        (
            SwinConfig(EMBED_DIM=6, DEPTHS=[1, 1, 1], NUM_HEADS=[3, 4, 5]),
            "K.NUM_HEADS: must divide the widths of the stages; stage 3 has 24 (got [3, 4, 5]).",
        ),
    ],
)
def test_sizes_that_make_no_network_are_named(block: Any, problem: str) -> None:
    texts = [str(each) for each in size_problems("K", block)]
    assert len(texts) == bool(problem) and all(text.startswith(problem) for text in texts), texts


def test_a_block_of_sizes_is_named_by_its_key() -> None:
    (problem,) = vision_transformer_problems(VisionTransformerConfig(HIDDEN_DIM=8, NUM_HEADS=3))
    assert problem.key == "config.MODEL.TRUNK.VISION_TRANSFORMERS.HIDDEN_DIM"
    assert [regnet_problems(RegNetConfig(w_0=width)) for width in (None, 8, 16)] == [[], [], []]
    (problem,) = regnet_problems(RegNetConfig(w_0=12))
    assert str(problem).startswith("config.MODEL.TRUNK.REGNET.w_0: must be a multiple of 8 (got 12).")


IDENTITY: list[Any] = ["Identity", []]
SETTINGS = "MODEL__FEATURE_EVAL_SETTINGS__"
TAPPED = {f"{SETTINGS}EVAL_MODE_ON": True, f"{SETTINGS}FREEZE_TRUNK_ONLY": True}
EXTRACTED = {f"{SETTINGS}EVAL_MODE_ON": True, f"{SETTINGS}EXTRACT_TRUNK_FEATURES_ONLY": True}


@pytest.mark.parametrize(
    ("changes", "of_heads", "of_features"),
    [
        ({}, False, False),
        (TAPPED, True, False),
        (EXTRACTED, False, True),
        (TAPPED | EXTRACTED, False, True),
        (TAPPED | {f"{SETTINGS}EVAL_MODE_ON": False}, False, False),
        (EXTRACTED | {f"{SETTINGS}EVAL_MODE_ON": False}, False, False),
    ],
)
def test_inner_layers_are_read_by_heads_or_as_features(
    changes: dict[str, Any], of_heads: bool, of_features: bool
) -> None:
    key = f"{SETTINGS}LINEAR_EVAL_FEAT_POOL_OPS_MAP"
    cfg = config(**{key: [["res4", IDENTITY]]}, **changes)
    assert (heads.are_tapped(cfg), heads.features_are_tapped(cfg)) == (of_heads, of_features)
    none = config(**{key: []}, **changes)
    assert not heads.are_tapped(none) and not heads.features_are_tapped(none)


def test_the_map_of_layers_has_an_entry_for_each_head() -> None:
    key = f"{SETTINGS}LINEAR_EVAL_FEAT_POOL_OPS_MAP"
    wrong = {key: ["res5", ["res4", ["Identiti", []]], ["res3", ["Zzz", []]], ["res2", IDENTITY]]}
    texts = [str(problem) for problem in heads.problems(config(**wrong, **TAPPED))]
    assert [text.split(": ")[0] for text in texts] == [heads.KEY] * 3 + ["config.MODEL.HEAD.PARAMS"]
    assert "must list [layer, [pooling, [arguments]]] (got res5). Write [" in texts[0]
    assert "AvgPool2d, MaxPool2d, Identity (got 'Identiti'). Did you mean 'Identity'?" in texts[1]
    assert "Identity (got 'Zzz'). Choose one of them." in texts[2]
    assert f"must list a head for each of the 4 layers of {heads.KEY} (got 1 heads)." in texts[3]
    # Features are not paired with heads, and a map that nothing reads may hold anything.
    assert len(heads.problems(config(**wrong, **EXTRACTED))) == 3
    assert heads.problems(config(**wrong)) == []
    assert heads.problems(config(**{key: [["res4", IDENTITY]]}, **TAPPED)) == []


def test_layers_are_named_apart() -> None:
    two = ["AvgPool2d", [2, 2]]
    entries = [["res5", IDENTITY], ["res4", IDENTITY], ["res4", two], ["res3", two], ["res3", two]]
    assert heads.layer_names(entries) == [
        "res5",
        "res4 Identity[]",
        "res4 AvgPool2d[2, 2]",
        "res3 AvgPool2d[2, 2], head 3",
        "res3 AvgPool2d[2, 2], head 4",
    ]


@pytest.mark.parametrize(
    ("name", "patch_size", "model_args", "side"),
    [
        ("vision_transformer", 14, None, 14),
        ("vision_transformer", 0, None, 1),  # which is reported elsewhere
        ("convit", 8, {"patch_size": 4}, 8),
        ("resnet", 14, None, 1),
        ("beit", 14, {"patch_size": 4}, 1),
        ("timm/vit_tiny_patch8_224", 14, None, 8),
        ("timm/deit_tiny_patch16", 14, {}, 16),
        ("timm/vit_tiny_patch16_224", 14, {"patch_size": 4}, 4),
        ("timm/vit_tiny_patch16_224", 14, {"patch_size": 0}, 1),
        ("timm/vit_tiny_patch16_224", 14, {"patch_size": "4"}, 16),
        ("timm/mixer_patch16_224", 14, None, 1),
        ("torchvision/vit_b_16", 14, None, 1),
    ],
)
def test_the_side_of_patches_is_known_without_the_model(
    name: str, patch_size: int, model_args: dict[str, Any] | None, side: int
) -> None:
    trunk = Trunk(NAME=name, PARAMS={} if model_args is None else {"model_args": model_args})
    trunk.VISION_TRANSFORMERS.PATCH_SIZE = patch_size
    assert patch_side(trunk) == side
