"""Recipes that freeze trunk and head train nothing, and say of which features kNN is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.config.example_config import CPU_HOST, config
from vissl_zero.config.compose import compose
from vissl_zero.config.recipes import recipe_files
from vissl_zero.errors import ConfigError
from vissl_zero.models.model import build_model
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.measuring import PROGRAM_RULES, without_training
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

SETTINGS = "config.MODEL.FEATURE_EVAL_SETTINGS"
TAPS = f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP"


def _plan(*words: str) -> ResolvedRun:
    run = compose("digits/simclr", [f"{SETTINGS}.EVAL_MODE_ON=true", *words]).run
    return resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def test_knn_of_the_head_s_embeddings():
    head = "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 8]}], [mlp, {dims: [8, 4]}]]"
    plan = _plan(f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true", head)
    assert plan.config.TEST_ONLY and plan.config.LOSS["name"] == "CrossEntropyLoss"
    assert plan.config.NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES == 10**8
    assert any("Nothing is trained" in note for note in plan.notes)
    model = build_model(plan.config.MODEL, num_classes=10).eval()
    with torch.no_grad():
        (rows,) = model([torch.rand(3, 3, 32, 32)], features_only=True)
    assert rows.shape == (3, 4)


def test_knn_of_the_trunk_s_features_needs_no_head():
    plan = _plan(
        f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true",
        "config.MODEL.HEAD.PARAMS=[]",
        f"{TAPS}=[[res5avg, [Identity, []]]]",
    )
    assert plan.config.TEST_ONLY and not plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_AND_HEAD
    maps = f"{TAPS}=[[res3, [AdaptiveAvgPool2d, [[2, 2]]]], [res5avg, [Identity, []]]]"
    plan = _plan(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true", maps)
    model = build_model(plan.config.MODEL, num_classes=10).eval()
    with torch.no_grad():
        (rows,) = model([torch.rand(3, 3, 32, 32)], features_only=True)
    assert model.feature_taps.widths == [rows.shape[1] - model.trunk.feature_dim, model.trunk.feature_dim]
    with pytest.raises(ConfigError, match="must name a pooling"):
        _plan(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true", f"{TAPS}=[[res3, [MeanPool, []]]]")


def test_images_alone_can_be_measured():
    run = compose("digits/supervised", ["config.TEST_ONLY=true", "config.DATA.TEST.DATA_SOURCES=[digits]"]).run
    run.DATA.TRAIN = type(run.DATA.TRAIN)()
    run.DATA.TEST.TRANSFORMS = [{"name": "ToTensor"}]
    plan = resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))
    assert plan.config.DATA.TRAIN == plan.config.DATA.TEST
    assert not plan.config.NEAREST_NEIGHBOR.USE_KNN
    assert any("config.DATA.TRAIN names none" in note for note in plan.notes)


def test_without_their_mode_the_switches_are_refused():
    run = compose("digits/simclr", [f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true"]).run
    with pytest.raises(ConfigError, match="FREEZE_TRUNK_AND_HEAD: needs EVAL_MODE_ON"):
        resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def test_a_knn_recipe_is_complete_and_a_base_of_its_models(tmp_path):
    data = "DATA: {TRAIN: {DATA_SOURCES: [disk_folder]}}"
    for name, text in {
        "knn/eval": f"config: {{MODEL: {{TRUNK: {{NAME: resnet}}}}, {data}, NEAREST_NEIGHBOR: {{TOPK: 20}}}}",
        "knn/models/vit": "config: {MODEL: {TRUNK: {NAME: vision_transformer}}, NEAREST_NEIGHBOR: {TOPK: 10}}",
    }.items():
        file = tmp_path / "config" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = [str(recipe) for recipe in recipe_files(tmp_path / "config", with_parts=True)]
    assert found == ["knn/eval", "knn/eval + knn/models/vit"]


_FEATURES = {"EVAL_MODE_ON": True, "EXTRACT_TRUNK_FEATURES_ONLY": True}
_PLAIN = ("lastCLS", "res5avg", "avgpool", "flatten")


@pytest.mark.parametrize(
    ("taps", "are_the_trunks_features"),
    [
        *(([[name, ["Identity", []]]], True) for name in _PLAIN),
        ([["res5", ["Identity", []]]], False),
        ([["res5avg", ["AdaptiveAvgPool2d", [[1, 1]]]]], False),
        ([["res5avg", ["Identity", []]], ["res4", ["Identity", []]]], False),
    ],
)
def test_which_map_of_layers_is_the_trunk_s_features(taps: list[Any], are_the_trunks_features: bool) -> None:
    changes: dict[str, Any] = {**_FEATURES, "LINEAR_EVAL_FEAT_POOL_OPS_MAP": taps}
    run = without_training(config(**{f"MODEL.FEATURE_EVAL_SETTINGS.{key}": value for key, value in changes.items()}))
    left = run.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP
    assert left == ([] if are_the_trunks_features else taps)


def test_knn_alone_sees_all_images_unless_a_number_is_written() -> None:
    changes = {f"MODEL.FEATURE_EVAL_SETTINGS.{key}": value for key, value in _FEATURES.items()}
    changes["NEAREST_NEIGHBOR.USE_KNN"] = True
    assert without_training(config(**changes)).NEAREST_NEIGHBOR.MAX_TEST_IMAGES == 10**8
    written = without_training(config(**changes, **{"NEAREST_NEIGHBOR.MAX_TEST_IMAGES": 7})).NEAREST_NEIGHBOR
    assert (written.MAX_TRAIN_IMAGES, written.MAX_TEST_IMAGES) == (10**8, 7)


# program, block of its keys, what it accepts, what it refuses, the key that it names
_TAPS = [["res4", ["Identity", []]], ["res5", ["Identity", []]]]
PROGRAMS: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    *(
        ("train_svm", "SVM", {"penalty": "l1", "dual": False, "loss": "squared_hinge"}, refused, key)
        for refused, key in (
            ({"penalty": "l1", "dual": True, "loss": "squared_hinge"}, "penalty"),
            ({"penalty": "l1", "dual": False, "loss": "hinge"}, "penalty"),
            ({"penalty": "l2", "dual": False, "loss": "hinge"}, "dual"),
        )
    ),
    ("train_svm", "SVM", {"loss": "hinge", "dual": True}, {"loss": "hinge", "dual": False}, "dual"),
    *(
        ("train_svm", "SVM.costs", {"base": 2.0, "power_range": [4, 5]}, {"base": 2.0, "power_range": powers}, "power_")
        for powers in ([4, 4], [5, 4], [4], [4, 5, 6])
    ),
    ("train_svm", "SVM.costs", {"base": 0.0, "power_range": [4]}, {"base": 0.5, "power_range": [4]}, "power_range"),
    *(
        ("train_svm", "SVM.costs", listed, {"costs_list": [], "base": 0.0}, "costs_list")
        for listed in ({"costs_list": [], "base": 0.5}, {"costs_list": [1.0], "base": 0.0})
    ),
    *(("train_svm_low_shot", "SVM.low_shot", {key: [1]}, {key: []}, key) for key in ("sample_inds", "k_values")),
    *(
        (
            "cluster_features_and_label",
            "CLUSTERFIT.FEATURES",
            {"LAYER_NAME": name},
            {"LAYER_NAME": "res5"},
            "LAYER_NAME",
        )
        for name in ("", "heads", "trunk", *_PLAIN)
    ),
    ("low_shot_test", "LOW_SHOT_BENCHMARK", {"METHOD": "logistic_regression"}, {"METHOD": "svm"}, "METHOD"),
    *(
        ("low_shot_test", "LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION", {"LAMBDA": value}, {"LAMBDA": other}, "LAMBDA")
        for value in (1, 0.5, [0.5, 2])
        for other in (0, -1.0, [], [1.0, 0], "1.0", True)
    ),
    ("low_shot_test", "LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION", {"SEEDS": [0]}, {"SEEDS": []}, "SEEDS"),
    *(
        (
            "instance_retrieval_test",
            "IMG_RETRIEVAL",
            {"DATASET_PATH": ".", **taken},
            {"DATASET_PATH": ".", **refused},
            key,
        )
        for key, taken, refused in (
            ("DATASET_PATH", {}, {"DATASET_PATH": ""}),
            ("DATASET_PATH", {}, {"DATASET_PATH": "nowhere"}),
            ("EVAL_DATASET_NAME", {"EVAL_DATASET_NAME": "roxford5k"}, {"EVAL_DATASET_NAME": "instre"}),
            ("IMG_SCALINGS", {"IMG_SCALINGS": [1.0, 0.5]}, {"IMG_SCALINGS": []}),
            (
                "IMG_SCALINGS",
                {"FEATS_PROCESSING_TYPE": "rmac", "IMG_SCALINGS": [0.5]},
                {"FEATS_PROCESSING_TYPE": "rmac", "IMG_SCALINGS": [1.0, 0.5]},
            ),
            (
                "TRAIN_PCA_WHITENING",
                {"FEATS_PROCESSING_TYPE": "gem", "TRAIN_PCA_WHITENING": False},
                {"FEATS_PROCESSING_TYPE": "rmac", "TRAIN_PCA_WHITENING": False},
            ),
            ("RESIZE_IMG", {"CENTER_CROP": True, "RESIZE_IMG": 1}, {"CENTER_CROP": True, "RESIZE_IMG": -1}),
            ("RESIZE_IMG", {"CENTER_CROP": False, "RESIZE_IMG": -1}, {"CENTER_CROP": True, "RESIZE_IMG": -1}),
            ("CROP_QUERY_ROI", {"CROP_QUERY_ROI": True}, {"CENTER_CROP": True, "CROP_QUERY_ROI": True}),
            ("WHITEN_IMG_LIST", {"WHITEN_IMG_LIST": "a"}, {"TRAIN_DATASET_NAME": "whitening"}),
            (
                "WHITEN_IMG_LIST",
                {"TRAIN_DATASET_NAME": "whitening", "TRAIN_PCA_WHITENING": False},
                {"TRAIN_DATASET_NAME": "whitening"},
            ),
        )
    ),
]


@pytest.mark.parametrize(("program", "block", "taken", "refused", "key"), PROGRAMS)
def test_a_program_refuses_keys_that_contradict_each_other(
    program: str, block: str, taken: dict[str, Any], refused: dict[str, Any], key: str
) -> None:
    def refusals(keys: dict[str, Any]) -> list[str]:
        cfg = config(PROGRAM=program, **{f"{block}.{name}": value for name, value in keys.items()})
        return [problem.key for rule in PROGRAM_RULES for problem in rule(cfg, Decisions(cfg, CPU_HOST))]

    assert refusals(taken) == []
    assert any(named.startswith(f"config.{block}.{key}") for named in refusals(refused))


@pytest.mark.parametrize("program", ["train_svm", "train_svm_low_shot", "low_shot_test"])
def test_a_program_that_tests_needs_images_of_test(program: str) -> None:
    cfg = config(PROGRAM=program, DATA__TEST__DATA_SOURCES=[])
    (problem,) = [problem for rule in PROGRAM_RULES for problem in rule(cfg, Decisions(cfg, CPU_HOST))]
    assert problem.key == "config.DATA.TEST.DATA_SOURCES"


def test_of_several_layers_one_is_clustered() -> None:
    for name, is_refused in (("", True), ("res4", False), ("res5", False), ("trunk", True)):
        keys = {"MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP": _TAPS}
        cfg = config(PROGRAM="cluster_features_and_label", CLUSTERFIT__FEATURES__LAYER_NAME=name, **keys)
        problems = [problem for rule in PROGRAM_RULES for problem in rule(cfg, Decisions(cfg, CPU_HOST))]
        assert bool(problems) == is_refused, name
