"""Keys that nothing reads in this run are named once, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.example_config import config
from vissl_zero.config.blocks.output import METERS, SvmLowShot
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


_DATA, _TRUNK, _EVAL = "DATA.TRAIN", "MODEL.TRUNK", "MODEL.FEATURE_EVAL_SETTINGS"
_RETRIEVES: dict[str, Any] = {"PROGRAM": "instance_retrieval_test"}
_ACCURACY: dict[str, Any] = {"LOSS.name": "CrossEntropyLoss"}
_SEGMENTS: dict[str, Any] = {"LOSS.name": "segmentation_loss"}
_TAPPED = {f"{_EVAL}.EVAL_MODE_ON": True, f"{_EVAL}.LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", ["Identity", []]]]}
_ONE_GROUP = "OPTIMIZER.construct_single_param_group_only"
# A key and a value, changes with which nothing reads it, changes with which something does, the reason.
CONDITIONS: list[tuple[str, Any, dict[str, Any], dict[str, Any], str]] = [
    ("SEED_VALUE", 5, {"SEEDS": [0, 1]}, {}, "config.SEEDS lists the seeds"),
    *(
        (f"DATA.{split}.DEFAULT_GRAY_IMG_SIZE", 64, {f"DATA.{split}.DATA_SOURCES": sources}, made, "a source makes")
        for split in ("TRAIN", "TEST")
        for made in [{f"DATA.{split}.DATA_SOURCES": ["synthetic"]}]
        for sources in (["digits"], ["disk_folder"], ["segmentation_folder"], [])
    ),
    *(
        (f"DATA.TEST.{key}", value, {"DATA.TEST.DATA_SOURCES": []}, {}, "TEST has no data source")
        for key, value in (("DATA_LIMIT", 5), ("LABEL_TYPE", "sample_index"), ("LABEL_SOURCES", ["disk_filelist"]))
    ),
    *(
        (f"DATA.{split}.DATA_LIMIT_SAMPLING.{key}", value, {}, {f"DATA.{split}.DATA_LIMIT": 10}, "DATA_LIMIT is -1")
        for split in ("TRAIN", "TEST")
        for key, value in (("SEED", 5), ("IS_BALANCED", True), ("SKIP_NUM_SAMPLES", 1))
    ),
    *(
        (f"DATA.{split}.COLLATE_FUNCTION_PARAMS", {"mixup_alpha": 1.0}, {}, mixed, "only cutmixup_collator has keys")
        for split in ("TRAIN", "TEST")
        for mixed in [{f"DATA.{split}.COLLATE_FUNCTION": "cutmixup_collator"}]
    ),
    (
        f"{_DATA}.COLLATE_FUNCTION_PARAMS",
        {"num_classes": 10},
        {f"{_DATA}.COLLATE_FUNCTION": "cutmixup_collator"},
        {f"{_DATA}.COLLATE_FUNCTION": "cutmixup_collator", **_ACCURACY},
        "the loss has no labels to mix",
    ),
    ("TRAINER.ROUNDING", "nearest", {}, {"TRAINER.DTYPE": "bfloat16"}, "TRAINER.DTYPE is not bfloat16"),
    ("TRAINER.CROP_PASSES", 2, {"TEST_ONLY": True}, {}, "nothing is trained"),
    *(
        ("DATA.ON_BROKEN_IMAGE", "skip", {f"DATA.{split}.DATA_SOURCES": made}, files, "no image is read from a file")
        for split in ("TRAIN", "TEST")
        for files in [{f"DATA.{split}.DATA_SOURCES": ["disk_folder"]}]
        for made in (["digits"], ["synthetic"], ["digit_scenes"], [])
    ),
    ("DATA.WORKER_TIMEOUT_S", 5.0, {}, {"DATA.NUM_DATALOADER_WORKERS": 1}, "there are no loader processes"),
    *(
        (f"DATA.{split}.LABEL_TYPE", "sample_index", {"TEST_ONLY": True}, {}, "each image counts under its own label")
        for split in ("TRAIN", "TEST")
    ),
    ("SVM.max_iter", 5, {}, {"PROGRAM": "train_svm"}, "engine_name is neither train_svm nor"),
    ("SVM.max_iter", 5, {}, {"PROGRAM": "train_svm_low_shot"}, "engine_name is neither train_svm nor"),
    (
        "SVM.low_shot",
        SvmLowShot("voc", [1]),
        {"PROGRAM": "train_svm"},
        {"PROGRAM": "train_svm_low_shot"},
        "not train_svm_low",
    ),
    ("SVM.cross_val_folds", 5, {"PROGRAM": "train_svm_low_shot"}, {"PROGRAM": "train_svm"}, "the best cost is"),
    ("CLUSTERFIT.NUM_CLUSTERS", 5, {}, {"PROGRAM": "cluster_features_and_label"}, "engine_name is not cluster"),
    ("LOW_SHOT_BENCHMARK.METHOD", "svm", {}, {"PROGRAM": "low_shot_test"}, "engine_name is not low_shot_test"),
    ("IMG_RETRIEVAL.RESIZE_IMG", 5, {}, _RETRIEVES, "engine_name is not instance_retrieval_test"),
    *(
        (f"IMG_RETRIEVAL.{key}", 2, {**_RETRIEVES, processing: other}, {**_RETRIEVES, processing: form}, f"not {form}")
        for processing in ["IMG_RETRIEVAL.FEATS_PROCESSING_TYPE"]
        for key, form, other in (("SPATIAL_LEVELS", "rmac", "gem"), ("GEM_POOL_POWER", "gem", "rmac"))
    ),
    *(
        (key, value, {**_RETRIEVES, "IMG_RETRIEVAL.TRAIN_PCA_WHITENING": False}, _RETRIEVES, "WHITENING is off")
        for key, value in (("IMG_RETRIEVAL.N_PCA", 5), ("IMG_RETRIEVAL.NUM_TRAINING_SAMPLES", 5))
    ),
    (
        "IMG_RETRIEVAL.WHITEN_IMG_LIST",
        "list.txt",
        _RETRIEVES,
        {**_RETRIEVES, "IMG_RETRIEVAL.TRAIN_DATASET_NAME": "whitening"},
        "TRAIN_DATASET_NAME is not whitening",
    ),
    (
        "CLUSTERFIT.DATA_LIMIT_SAMPLING.SEED",
        5,
        {"PROGRAM": "cluster_features_and_label"},
        {"PROGRAM": "cluster_features_and_label", "CLUSTERFIT.DATA_LIMIT": 10},
        "DATA_LIMIT is -1",
    ),
    (f"{_TRUNK}.REGNET.se_ratio", 0.5, {}, {f"{_TRUNK}.REGNET.use_se": True}, "use_se is off"),
    *(
        (f"{_TRUNK}.RESNETS.GROUPNORM_GROUPS", 2, {name: "resnet", norm: "BatchNorm"}, read, "NORM is not GroupNorm")
        for name, norm in [(f"{_TRUNK}.NAME", f"{_TRUNK}.RESNETS.NORM")]
        for read in ({name: "resnet", norm: "GroupNorm"}, {name: "regnet", norm: "BatchNorm"})
    ),
    *(
        (f"MODEL.HEAD.BATCHNORM_{key}", 0.5, {"MODEL.HEAD.PARAMS": [without]}, {}, "no head has batch norm")
        for key in ("EPS", "MOMENTUM")
        for without in (["swav_head", {}], ["mlp", {}], ["mlp", {"use_bn": False}])
    ),
    *(
        ("MODEL.HEAD.BATCHNORM_EPS", 0.5, {"MODEL.HEAD.PARAMS": [["mlp", {}]]}, heads, "no head has batch norm")
        for heads in [{"MODEL.HEAD.PARAMS": [["mlp", {}], ["one_of_your_own", {}]]}]
    ),
    *(
        (f"{_EVAL}.ASSERT_HEAD_LAYER_SHAPE_INIT", True, {}, read, "no weights are loaded")
        for read in ({"MODEL.WEIGHTS_INIT.PARAMS_FILE": "x"}, {f"{_EVAL}.FREEZE_TRUNK_ONLY": True})
    ),
    (f"{_EVAL}.EVAL_TRUNK_AND_HEAD", True, {}, {f"{_EVAL}.EVAL_MODE_ON": True}, "taken from WEIGHTS_INIT anyway"),
    *(
        (key, value, {f"{_EVAL}.{name}": True for name in unread}, {**_TAPPED, f"{_EVAL}.{frozen}": True}, "not frozen")
        for key, value in [(f"{_EVAL}.LINEAR_EVAL_FEAT_POOL_OPS_MAP", [["res5", ["Identity", []]]])]
        for unread in (["FREEZE_TRUNK_ONLY"], ["EXTRACT_TRUNK_FEATURES_ONLY"], ["EVAL_MODE_ON"])
        for frozen in ("FREEZE_TRUNK_ONLY", "EXTRACT_TRUNK_FEATURES_ONLY")
    ),
    (
        f"{_EVAL}.SHOULD_FLATTEN_FEATS",
        False,
        {**_TAPPED, f"{_EVAL}.EXTRACT_TRUNK_FEATURES_ONLY": True},
        {**_TAPPED, f"{_EVAL}.FREEZE_TRUNK_ONLY": True},
        "no head sees an inner layer",
    ),
    *(
        (f"LOSS.swav_loss.queue.{key}", 1, {"LOSS.swav_loss.queue.queue_length": 0}, read, "queue_length is 0")
        for key in ("start_iter", "start_epoch")
        for read in ({}, {"LOSS.swav_loss.queue.queue_length": 0, "LOSS.name": "simclr_info_nce_loss"})
    ),
    *(
        ("LOSS.swav_loss.queue.start_epoch", 5, {"OPTIMIZER.num_epochs": last}, read, "the run ends before")
        for last in (4, 5)
        for read in ({"OPTIMIZER.num_epochs": 6}, {"OPTIMIZER.num_epochs": 5, "LOSS.name": "simclr_info_nce_loss"})
    ),
    *(
        (f"OPTIMIZER.{key}", value, {"OPTIMIZER.weight_decay": 0.0}, read, "weight decay is 0")
        for key, value in (
            ("regularize_bn", True),
            ("regularize_bias", False),
            ("non_regularized_parameters", ["x"]),
        )
        for read in (
            {},
            {"OPTIMIZER.weight_decay": 0.0, f"{_HEAD}.use_different_wd": True},
            {"OPTIMIZER.weight_decay": 0.0, "OPTIMIZER.base_optimizer.weight_decay": 0.1},
            {"OPTIMIZER.weight_decay": 0.0, "OPTIMIZER.param_schedulers.weight_decay.name": "constant"},
            {"OPTIMIZER.weight_decay": 0.0, "OPTIMIZER.param_schedulers.weight_decay_head.name": "constant"},
        )
    ),
    *(
        (key, value, {_ONE_GROUP: True}, {}, "parameters are grouped otherwise")
        for key, value in (
            (f"{_HEAD}.use_different_lr", True),
            (f"{_HEAD}.use_different_wd", True),
            (f"{_HEAD}.weight_decay", 0.5),
            ("OPTIMIZER.regularize_bn", True),
            ("OPTIMIZER.regularize_bias", False),
            ("OPTIMIZER.non_regularized_parameters", ["x"]),
        )
    ),
    (
        f"{_HEAD}.use_different_wd",
        True,
        {f"{_HEAD}.weight_decay": 0.01},
        {f"{_HEAD}.weight_decay": 0.02},
        "the heads' weight decay is that of the trunk",
    ),
    *(
        (
            "OPTIMIZER.linear_eval_heads",
            [{"lr": 0.5}],
            unread,
            {"OPTIMIZER.param_group_constructor": "linear_eval_heads"},
            "param_group_constructor is not linear_eval_heads",
        )
        for unread in ({}, {"OPTIMIZER.param_group_constructor": "linear_eval_heads", _ONE_GROUP: True})
    ),
    ("OPTIMIZER.use_zero", False, {}, {"OPTIMIZER.use_zero": True}, "only True asks for sharded state"),
    ("OPTIMIZER.param_group_constructor", "dino", {_ONE_GROUP: True}, {}, "construct_single_param_group_only is set"),
    *(
        ("TEST_EVERY_NUM_EPOCH", 2, unread, read, "neither top-1 nor mIoU on TEST is measured")
        for unread in ({}, {**_ACCURACY, "TEST_MODEL": False}, {**_SEGMENTS, "DATA.TEST.DATA_SOURCES": []})
        for read in (_ACCURACY, _SEGMENTS, {"LOSS.name": "one_of_your_own"})
    ),
    *(
        (key, value, unread, _ACCURACY, "no top-1 on TEST is measured")
        for key, value in (
            ("METERS.name", "accuracy_list_meter"),
            ("METERS.names", ["accuracy_list_meter"]),
            ("CHECKPOINT.SAVE_BEST", True),
        )
        for unread in ({}, _SEGMENTS, {**_ACCURACY, "TEST_MODEL": False}, {**_ACCURACY, "DATA.TEST.DATA_SOURCES": []})
    ),
    ("CHECKPOINT.SAVE_BEST", True, {}, {"CHECKPOINT.BEST_METRIC": "loss"}, "no top-1 on TEST is measured"),
    ("CHECKPOINT.BEST_METRIC", "loss", {}, {"CHECKPOINT.SAVE_BEST": True}, "SAVE_BEST is false"),
    *(
        ("EVALUATED_MODEL", "teacher", {"NEAREST_NEIGHBOR.USE_KNN": False}, read, "neither kNN nor the online probe")
        for read in (
            {"NEAREST_NEIGHBOR.USE_KNN": True},
            {"NEAREST_NEIGHBOR.USE_KNN": False, "ONLINE_PROBE.USE_PROBE": True},
        )
    ),
    *(
        ("TEST_MODEL", False, {}, read, "measured either way")
        for read in (_ACCURACY, _SEGMENTS, {"PROGRAM": "extract_features"})
    ),
    *(
        (f"METERS.{meter}.topk_values", [2], unread, {**_ACCURACY, **asked}, "METERS.names does not ask for it")
        for meter in METERS
        for asked in ({"METERS.name": meter}, {"METERS.names": [meter]})
        for unread in (asked, _ACCURACY, {**_ACCURACY, **asked, "TEST_MODEL": False})
    ),
    *(
        (f"CHECKPOINT.{key}", value, {f"CHECKPOINT.CHECKPOINT_{every}": -1 for every in both}, read, "no checkpoint is")
        for both in [("FREQUENCY", "ITER_FREQUENCY")]
        for key, value in (("KEEP_LAST", 5), ("KEEP_EVERY", 5), ("ASYNC", False))
        for read in ({}, {"CHECKPOINT.CHECKPOINT_FREQUENCY": -1, "CHECKPOINT.CHECKPOINT_ITER_FREQUENCY": 1})
    ),
    *(
        (f"CHECKPOINT.{key}", value, {"CHECKPOINT.AUTO_RESUME": False}, {}, "AUTO_RESUME is off")
        for key, value in (("LATEST_CHECKPOINT_RESUME_FILE_NUM", 2), ("ALLOW_CHANGED", ["x"]))
    ),
]


@pytest.mark.parametrize(
    ("key", "value", "unread", "read", "why"), CONDITIONS, ids=[f"{at}-{row[0]}" for at, row in enumerate(CONDITIONS)]
)
def test_a_key_has_no_effect_where_its_condition_holds_alone(
    key: str, value: Any, unread: dict[str, Any], read: dict[str, Any], why: str
) -> None:
    for changes, is_noted in ((unread, True), (read, False)):
        notes = inactive_keys(config(**{key: value, **changes}))
        assert any(f"config.{key}" in note and why in note for note in notes) == is_noted, notes
