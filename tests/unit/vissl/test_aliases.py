"""VISSL's second names for what it shards mean the one class, trained by any level."""

from __future__ import annotations

import pytest

from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolve import resolve

LARC = "config.OPTIMIZER.use_larc=true"
HEAD = "dims:[64,64,16],num_clusters:[30]"


def plan(tmp_path, *overrides):
    composed = compose("quickstart/swav_digits", ["config.ZERO.LEVEL=auto", *overrides])
    return resolve(composed.run, tmp_path, recipe=composed.recipe, written=composed.written), composed


@pytest.mark.parametrize(
    ("alias", "own"),
    [
        (["config.MODEL.TRUNK.NAME=regnet_fsdp"], ["config.MODEL.TRUNK.NAME=regnet"]),
        (
            [f"config.MODEL.HEAD.PARAMS=[[swav_head_fsdp,{{{HEAD}}}]]"],
            [f"config.MODEL.HEAD.PARAMS=[[swav_head,{{{HEAD}}}]]"],
        ),
        (["config.OPTIMIZER.name=sgd_fsdp", LARC], ["config.OPTIMIZER.name=sgd", LARC]),
        (
            ["config.OPTIMIZER.name=zero", "config.OPTIMIZER.base_optimizer.name=sgd_fsdp"],
            ["config.OPTIMIZER.name=zero", "config.OPTIMIZER.base_optimizer.name=sgd"],
        ),
        (["config.TRAINER.TASK_NAME=self_supervision_sdp_task"], ["config.ZERO.LEVEL=2"]),
        (["config.TRAINER.TASK_NAME=self_supervision_fsdp_task"], ["config.ZERO.LEVEL=3"]),
    ],
)
def test_an_alias_is_the_one_class(alias, own, tmp_path):
    (aliased, composed), (plain, _) = plan(tmp_path, *alias), plan(tmp_path, *own)
    assert (aliased.sharding, aliased.optimizer) == (plain.sharding, plain.optimizer)
    for block in ("MODEL", "LOSS"):
        assert getattr(aliased.config, block) == getattr(plain.config, block)
    assert alias[0].split("=")[1].strip("[]").split(",")[0] in composed.user_yaml()  # written as the user wrote it


def test_the_linear_head_has_one_too():
    composed = compose("supervised/digits", ["config.MODEL.HEAD.PARAMS=[[mlp_fsdp,{dims:[64,10]}]]"])
    assert composed.run.MODEL.HEAD.PARAMS == [["mlp", {"dims": [64, 10]}]]


def test_a_number_wins_over_the_task_and_says_so(tmp_path):
    task = "config.TRAINER.TASK_NAME=self_supervision_fsdp_task"
    resolved, _ = plan(tmp_path, task, "config.ZERO.LEVEL=1")
    assert resolved.sharding.level == 1
    assert f"config.ZERO.LEVEL=1 wins over {task}, which stands for level 3." in resolved.notes


def test_of_a_regnets_name_and_parameters_the_name_counts(tmp_path):
    """As in VISSL, whose overlays name a network over a base that gives parameters."""
    regnet, name = "config.MODEL.TRUNK.REGNET", "config.MODEL.TRUNK.REGNET.name=regnet_y_400mf"
    resolved, composed = plan(tmp_path, name)  # the recipe has parameters
    block = resolved.config.MODEL.TRUNK.REGNET
    assert block.name == "regnet_y_400mf" and block.depth is block.w_0 is block.group_width is None
    (note,) = (note for note in composed.notes if "REGNET" in note)
    assert f"{regnet}.depth, {regnet}.w_0" in note and "the name regnet_y_400mf says them" in note
    with pytest.raises(ConfigError, match="must have a name or parameters"):
        plan(tmp_path, name, f"{regnet}.depth=4")  # who writes both on one line means the number


OLD = """# @package _global_
config:
  TENSORBOARD_SETUP: {USE_TENSORBOARD: False}
  MODEL: {TRUNK: {NAME: resnet, TRUNK_PARAMS: {RESNETS: {DEPTH: 18, WIDTH_MULTIPLIER: 2}}%s}}
"""
PLACE = "config.MODEL.TRUNK.TRUNK_PARAMS.RESNETS"


@pytest.mark.parametrize(
    ("more", "words", "depth"),
    [
        ("", [], 18),
        (", RESNETS: {DEPTH: 34}", [], 34),  # VISSL reads this place alone today
        ("", ["config.MODEL.TRUNK.RESNETS.DEPTH=50"], 50),
        ("", [f"{PLACE}.DEPTH=101"], 101),
    ],
)
def test_blocks_of_earlier_recipes_are_read_at_their_places_of_today(more, words, depth, tmp_path, monkeypatch):
    recipe = tmp_path / "configs" / "config" / "extra" / "old.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(OLD % more)
    monkeypatch.chdir(tmp_path)
    run = compose("quickstart/swav_digits", ["+config/extra=old", *words]).run
    resnet = run.MODEL.TRUNK.RESNETS
    assert depth == resnet.DEPTH and resnet.WIDTH_MULTIPLIER == 2
    assert not run.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD
    with pytest.raises(ConfigError, match=r"config\.MODEL\.TRUNK\.RESNETS\.DEPHT: is not a key\. Did you mean 'DEPTH'"):
        compose("quickstart/swav_digits", ["+config/extra=old", f"{PLACE}.DEPHT=1"])


def test_a_plus_that_vissl_needs_is_accepted_where_the_key_is_known_here():
    assert compose("quickstart/swav_digits", ["+config.SEED_VALUE=5"]).run.SEED_VALUE == 5
