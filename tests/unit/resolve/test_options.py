"""A component's own keys against its dataclass; components of a user's own, from YAML to the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.unit.config.example_config import CPU_HOST, complaints
from vissl_zero.config.components import builtin_keys, typed_options
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HEADS, LOSSES, OPTIMIZERS, TRUNKS, Component
from vissl_zero.resolve.resolve import resolve


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


def test_builtin_dataclasses_are_those_that_are_registered():
    for registry in (TRUNKS, HEADS, LOSSES, OPTIMIZERS):
        for name, schema in builtin_keys(registry.kind).items():
            assert registry.get(name).config is schema


PLUGIN = '''
from dataclasses import dataclass
from vissl_zero.registry import HEADS, LOSSES, OPTIMIZERS, TRUNKS

@dataclass
class MyKeys:
    scale: float = 1.0

@HEADS.register("plugin_head", config=MyKeys)
@LOSSES.register("plugin_loss", config=MyKeys)
@OPTIMIZERS.register("plugin_optimizer", config=MyKeys)
@TRUNKS.register("plugin_trunk", config=MyKeys)
def build(**options):
    """Of my own."""
'''
USED = [
    "config.IMPORTS=[my_plugin_for_a_test]",
    "config.MODEL.TRUNK.NAME=plugin_trunk",
    "+config.MODEL.TRUNK.PARAMS.scale=2",
    "config.MODEL.HEAD.PARAMS=[[plugin_head,{scale: 3}]]",
    "config.LOSS.name=plugin_loss",
    "+config.LOSS.plugin_loss.scale=4",
    "config.OPTIMIZER.name=zero",
    "config.OPTIMIZER.base_optimizer.name=plugin_optimizer",
    "+config.OPTIMIZER.base_optimizer.PARAMS.scale=5",
]


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_plugin_for_a_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_components_of_ones_own_have_typed_keys(plugin):
    plan = resolve(compose("quickstart/swav_digits", USED).run, "runs/x", host=CPU_HOST)
    assert (plan.config.MODEL.TRUNK.NAME, plan.config.MODEL.TRUNK.PARAMS) == ("plugin_trunk", {"scale": 2.0})
    assert plan.config.MODEL.HEAD.PARAMS == [["plugin_head", {"scale": 3.0}]]
    assert plan.config.LOSS == {"name": "plugin_loss", "plugin_loss": {"scale": 4.0}}
    assert (plan.optimizer.name, plan.optimizer.options) == ("plugin_optimizer", {"scale": 5.0})


def test_their_mistyped_keys_are_refused_too(plugin):
    wrong = [
        word.replace("PARAMS.scale", "PARAMS.scael").replace("plugin_loss.scale", "plugin_loss.scael") for word in USED
    ]
    with pytest.raises(ConfigError) as caught:
        resolve(compose("quickstart/swav_digits", wrong).run, "runs/x", host=CPU_HOST)
    assert str(caught.value).split("\n") == [
        "config.MODEL.TRUNK.PARAMS.scael: is not a key. Did you mean 'scale'?",
        "config.LOSS.plugin_loss.scael: is not a key. Did you mean 'scale'?",
        "config.OPTIMIZER.base_optimizer.PARAMS.scael: is not a key. Did you mean 'scale'?",
    ]


def test_a_module_that_is_not_there():
    with pytest.raises(ConfigError, match="must name importable Python modules"):
        resolve(compose("quickstart/swav_digits", ["config.IMPORTS=[no_such_module]"]).run, "runs/x")


def test_a_head_of_the_wrong_type_of_key():
    (found,) = complaints(MODEL__HEAD__PARAMS=[["swav_head", {"dims": "wide", "num_clusters": [3]}]])
    assert "config.MODEL.HEAD.PARAMS[0][1].dims: must be a list" in found


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
