"""Keys whose switch is off are named once, and only then."""

from __future__ import annotations

import pytest

from vissl_zero.config.compose import load
from vissl_zero.config.derive.switched_off import switched_off

_HEAD = "OPTIMIZER.head_optimizer_params"


@pytest.mark.parametrize(
    ("unread", "switch", "why"),
    [
        ("MODEL.WEIGHTS_INIT.REMOVE_PREFIX=x", "MODEL.WEIGHTS_INIT.PARAMS_FILE=x", "is not set"),
        (f"{_HEAD}.weight_decay=1", f"{_HEAD}.use_different_wd=true", "is off"),
        ("OPTIMIZER.param_schedulers.lr_head.update_interval=step", f"{_HEAD}.use_different_lr=true", "is off"),
        ("HOOKS.EMA_MODEL.DECAY=0.5", "HOOKS.EMA_MODEL.SAVE_EMA_MODEL=true", "is off"),
        ("DISTRIBUTED.MIN_PROC_PER_NODE=1", "DISTRIBUTED.MAX_RESTARTS=1", "is not set"),
        ("DISTRIBUTED.RUN_ID=a:1", "DISTRIBUTED.NUM_NODES=2", "nobody to meet"),
        ("MODEL.TRUNK.RESNETS.DEPTH=18", "MODEL.TRUNK.NAME=resnet", "the trunk is regnet"),
        (
            "OPTIMIZER.param_schedulers.lr.milestones=[3]",
            "OPTIMIZER.param_schedulers.lr.name=multistep",
            "is composite",
        ),
    ],
)
def test_a_key_without_its_switch(unread, switch, why):
    (note,) = switched_off(load("quickstart/swav_digits", [f"config.{unread}"]))
    named, _, reason = note.partition(" has no effect: ")
    assert f"config.{unread}".startswith(named) and why in reason  # the key, or the block that it is in
    with_switch = load("quickstart/swav_digits", [f"config.{unread}", f"config.{switch}"])
    assert not any(other.startswith(f"{named} has") for other in switched_off(with_switch))


def test_only_learning_rates_are_scaled():
    decay = "config.OPTIMIZER.param_schedulers.weight_decay"
    words = [f"{decay}.name=cosine", f"{decay}.auto_lr_scaling.auto_scale=true"]
    assert switched_off(load("quickstart/swav_digits", words)) == [
        f"{decay}.auto_lr_scaling has no effect: only learning rates are scaled."
    ]


@pytest.mark.parametrize("recipe", ["quickstart/swav_digits", "pretrain/swav/regnet_16gf", "benchmark/linear"])
def test_recipes_of_ours_set_nothing_in_vain(recipe):
    assert switched_off(load(recipe)) == []
