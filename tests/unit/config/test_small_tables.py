"""Decisions of few words: what is a name of a library, an entry for a layer, and a place in a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from vissl_zero.config.block_data import block_of, declared_keys
from vissl_zero.config.components import builtin_keys, component_keys
from vissl_zero.config.components.heads import _is_entry
from vissl_zero.config.override_paths import _places, _problem, blocked
from vissl_zero.config.weights_name import absolute, scheme_of
from vissl_zero.registry import Registry


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("hf:org/model", "hf"),
        ("timm:resnet18", "timm"),
        ("torchvision:resnet18", "torchvision"),
        ("torchhub:dino", "torchhub"),
        ("timm:", ""),
        ("timm", ""),
        ("s3:file", ""),
        ("./timm:x", ""),
    ],
)
def test_a_scheme_is_a_known_word_before_a_name(name: str, scheme: str) -> None:
    assert scheme_of(name) == scheme


def test_a_path_is_made_absolute_also_after_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    names = ("weights.pt", "hf:model", "hf:org/model", "timm:model")
    assert [absolute(name) for name in names] == [f"{tmp_path}/weights.pt", f"hf:{tmp_path}/model", *names[2:]]


@pytest.mark.parametrize(
    ("entry", "is_one"),
    [
        (["res5", ["Identity", []]], True),
        (("res5", ("AvgPool2d", [[2, 2]])), True),
        ("res5", False),
        (["res5"], False),
        ([5, ["Identity", []]], False),
        (["res5", "Identity"], False),
        (["res5", ["Identity"]], False),
        (["res5", ["Identity", [], []]], False),
        (["res5", [1, []]], False),
        (["res5", ["Identity", 2]], False),
        (["res5", ["Identity", []], 1], False),
    ],
)
def test_an_entry_is_a_layer_and_a_pooling_with_its_arguments(entry: Any, is_one: bool) -> None:
    assert _is_entry(entry) is is_one


def test_places_are_first_those_below_the_other_names() -> None:
    transforms = [{"name": "Resize", "size": 32}, {"name": "RandomApply", "transforms": [{"name": "Blur", "size": 3}]}]
    assert _places(transforms, ["size"]) == ["[0].size", "[1].transforms[0].size"]
    assert _places(transforms, ["Blur", "size"]) == ["[1].transforms[0].size"]
    assert _places(transforms, ["Resize", "size"]) == ["[0].size"]
    assert _places(transforms, ["other", "size"]) == ["[0].size", "[1].transforms[0].size"]
    assert _places(transforms, ["Blur", "p"]) == []


def test_only_what_goes_through_a_list_or_a_value_is_blocked() -> None:
    tree = OmegaConf.create(
        {"none": None, "of": "${none}", "block": {"a": 1, "list": [{"b": 2}]}, "text": "${x}/y", "empty": {}}
    )
    for key in ("none.a", "of.a", "text.a", "empty.a.b", "block.c.d", "block.a", "block.list.0.b", "block.list.0.c"):
        assert _problem(tree, key.split("."), "") is None, key
    for key in ("block.a.b", "block.list.b", "block.list.1", "block.list.0.b.c"):
        assert _problem(tree, key.split("."), "") is not None, key
    for sign in ("+", "~"):
        assert _problem(tree, ["block", "list", "0"], sign) is not None
        assert _problem(tree, ["block", "list", "0", "b"], sign) is None


def test_words_are_applied_in_order_also_those_that_add_keys() -> None:
    words = [
        "+block.new=[1,2]",
        "block.new.a=3",
        "+block.x={y: 1}",
        "block.x.y.z=2",
        "~block.x",
        "block.x.y=4",
        "other=1,2",
    ]
    tree = OmegaConf.create({"block": {}})
    OmegaConf.set_struct(tree, True)  # as Hydra leaves it
    assert list(blocked(tree, words)) == ["block.new.a=3", "block.x.y.z=2"]


def test_keys_of_a_component_are_its_own_and_a_built_in_one_is_not_imported_for_them() -> None:
    registry = Registry("head", "config.MODEL.HEAD", {"mlp": ("nowhere", "A module that is not there.")})
    registry.register("mine", config=int)(dict)
    assert component_keys(registry, "mine") is int
    assert component_keys(registry, "mlp") is builtin_keys("head")["mlp"]


@dataclass
class _Inner:
    a: int = 1


@dataclass
class _Outer:
    inner: _Inner = field(default_factory=_Inner)
    free: dict[str, Any] = field(default_factory=dict)
    b: int = 2


def test_a_component_takes_the_keys_that_it_declares_block_by_block() -> None:
    data = {"inner": {"a": 3, "of_vissl": 4}, "free": {"any": 5}, "of_vissl": 6}
    assert declared_keys(data, _Outer) == {"inner": {"a": 3}, "free": {"any": 5}}
    assert declared_keys({"inner": None, "b": 7}, _Outer) == {"inner": None, "b": 7}  # a value, as it is written


def test_plain_data_become_a_block_again() -> None:
    assert block_of(_Outer, {"inner": {"a": 3}, "free": {"any": 5}}) == _Outer(_Inner(3), {"any": 5})
    assert block_of(_Outer, {"inner": _Inner(4)}) == _Outer(_Inner(4))
    for wrong, said in (({"c": 1}, "c is no key of _Outer"), ({"inner": 3}, "3 is no block of _Inner")):
        with pytest.raises(ValueError, match=said):
            block_of(_Outer, wrong)
