"""Components of a user's own, from YAML to the plan."""

from __future__ import annotations

import pytest

from tests.unit.config.example_config import CPU_HOST, complaints
from vissl_zero.config.components import builtin_keys
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HEADS, LOSSES, OPTIMIZERS, TRUNKS
from vissl_zero.resolve.resolve import resolve


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
