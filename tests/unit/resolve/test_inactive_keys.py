"""Keys that nothing reads in this run are named once, and only then."""

from __future__ import annotations

import pytest

from vissl_zero.config.compose import load
from vissl_zero.resolve.inactive import inactive_keys

_HEAD = "OPTIMIZER.head_optimizer_params"


@pytest.mark.parametrize(
    ("unread", "switch", "why"),
    [
        ("MODEL.WEIGHTS_INIT.REMOVE_PREFIX=x", "MODEL.WEIGHTS_INIT.PARAMS_FILE=x", "is not set"),
        (f"{_HEAD}.weight_decay=1", f"{_HEAD}.use_different_wd=true", "is off"),
        ("OPTIMIZER.param_schedulers.lr_head.update_interval=step", f"{_HEAD}.use_different_lr=true", "is off"),
        ("HOOKS.EMA_MODEL.DECAY=0.5", "HOOKS.EMA_MODEL.SAVE_EMA_MODEL=true", "is off"),
        ("DISTRIBUTED.MIN_PROC_PER_NODE=1", "DISTRIBUTED.MAX_RESTARTS=1", "is not set"),
        ("DISTRIBUTED.RUN_ID=a:1", "DISTRIBUTED.NUM_NODES=2", "needs no rendezvous"),
        ("TRAINER.EXACT_ACCUMULATION=true", "ZERO.gradient_accumulation_steps=2", "one micro-batch"),
        ("MODEL.TRUNK.RESNETS.DEPTH=18", "MODEL.TRUNK.NAME=resnet", "the trunk is regnet"),
        (
            "OPTIMIZER.param_schedulers.lr.milestones=[3]",
            "OPTIMIZER.param_schedulers.lr.name=multistep",
            "is composite",
        ),
    ],
)
def test_a_key_without_its_switch(unread, switch, why):
    (note,) = inactive_keys(load("quickstart/swav_digits", [f"config.{unread}"]))
    named, _, reason = note.partition(" has no effect: ")
    assert f"config.{unread}".startswith(named) and why in reason  # the key, or the block that it is in
    with_switch = load("quickstart/swav_digits", [f"config.{unread}", f"config.{switch}"])
    assert not any(other.startswith(f"{named} has") for other in inactive_keys(with_switch))


def test_passes_need_a_training():
    words = ["config.TRAINER.CROP_PASSES=2"]
    notes = inactive_keys(load("quickstart/swav_digits", [*words, "config.TEST_ONLY=true"]))
    assert "config.TRAINER.CROP_PASSES has no effect: nothing is trained." in notes
    assert not any("CROP_PASSES" in note for note in inactive_keys(load("quickstart/swav_digits", words)))


def test_only_learning_rates_are_scaled():
    decay = "config.OPTIMIZER.param_schedulers.weight_decay"
    words = [f"{decay}.name=cosine", f"{decay}.auto_lr_scaling.auto_scale=true"]
    assert inactive_keys(load("quickstart/swav_digits", words)) == [
        f"{decay}.auto_lr_scaling has no effect: only learning rates are scaled."
    ]


@pytest.mark.parametrize("recipe", ["quickstart/swav_digits", "pretrain/swav/regnet_16gf", "benchmark/linear"])
def test_recipes_of_ours_set_nothing_in_vain(recipe):
    assert inactive_keys(load(recipe)) == []


def test_a_seed_beside_several() -> None:
    words = ["config.SEEDS=[0,1]", "config.SEED_VALUE=5"]
    assert inactive_keys(load("quickstart/swav_digits", words)) == [
        "config.SEED_VALUE has no effect: config.SEEDS lists the seeds."
    ]


def test_a_weight_decay_of_the_heads_that_is_no_other():
    words = [f"config.{_HEAD}.use_different_wd=true", f"config.{_HEAD}.weight_decay=0.01"]
    (note,) = inactive_keys(load("quickstart/swav_digits", words))
    assert "use_different_wd has no effect" in note
    assert inactive_keys(load("quickstart/swav_digits", [*words, "config.OPTIMIZER.weight_decay=0.1"])) == []


@pytest.mark.parametrize(
    ("unread", "why"),
    [
        ("DATA.TRAIN.DEFAULT_GRAY_IMG_SIZE=64", "only images that a source makes have this size"),
        ("DATA.TEST.BATCHSIZE_PER_REPLICA=3", "evaluation takes every image once"),
        ("DATA.ON_BROKEN_IMAGE=skip", "no image is read from a file"),
        ("LOSS.swav_loss.queue.start_epoch=60", "the run ends before the queue begins"),
        ("MODEL.FEATURE_EVAL_SETTINGS.ASSERT_HEAD_LAYER_SHAPE_INIT=true", "no weights are loaded"),
        ("MODEL.TRUNK.REGNET.se_ratio=0.5", "use_se is off"),
        ("OPTIMIZER.regularize_bn=true", "weight decay is 0"),
    ],
)
def test_a_key_that_nothing_reads(unread, why):
    around = ["config.MODEL.TRUNK.REGNET.use_se=false", "config.OPTIMIZER.weight_decay=0"]
    assert inactive_keys(load("quickstart/swav_digits", around)) == []
    (note,) = inactive_keys(load("quickstart/swav_digits", [*around, f"config.{unread}"]))
    assert note.startswith(f"config.{unread.split('=')[0]} has no effect: {why}")


def test_nothing_is_evaluated():
    words = ["config.EVALUATED_MODEL=teacher", "config.NEAREST_NEIGHBOR.USE_KNN=false"]
    (note,) = inactive_keys(load("digits/dino", words))
    assert note == "config.EVALUATED_MODEL has no effect: neither kNN nor the online probe is on."
    assert inactive_keys(load("digits/dino", [*words, "config.ONLINE_PROBE.USE_PROBE=true"])) == []
