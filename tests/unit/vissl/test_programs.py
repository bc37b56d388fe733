"""VISSL's programs: a recipe that is given to one trains nothing, and what a program reads is read by it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vissl_zero.commands.explain import account_of
from vissl_zero.config.compose import compose
from vissl_zero.config.programs import ASSIGNMENTS, PREDICTIONS, PROGRAMS, RETRIEVAL, begin_program
from vissl_zero.config.recipes import recipe_file
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HOOKS
from vissl_zero.reporting.hooks import build_hooks
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

SETTINGS = "config.MODEL.FEATURE_EVAL_SETTINGS"
TAPS = f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP"
LAYERS = f"{TAPS}=[[res3, [AdaptiveAvgPool2d, [[2, 2]]]], [res5avg, [Identity, []]]]"


def _plan(*words: str) -> ResolvedRun:
    composed = compose("digits/simclr", words)
    return resolve(
        composed.run, "/nowhere", written=composed.written, host=Host(num_gpus=0, why_no_gpu="", num_cores=1)
    )


def _refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        _plan(*words)
    return str(error.value)


@pytest.mark.parametrize("name", ["train_svm", "train_svm_low_shot", "extract_features", "cluster_features_and_label"])
def test_a_program_takes_the_features_of_any_recipe_layer_by_layer(name):
    plan = _plan(f"engine_name={name}", LAYERS, "config.CLUSTERFIT.FEATURES.LAYER_NAME=res3")
    settings = plan.config.MODEL.FEATURE_EVAL_SETTINGS
    assert plan.config.TEST_ONLY and name == plan.config.PROGRAM
    assert [entry[0] for entry in settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP] == ["res3", "res5avg"]
    assert not plan.config.NEAREST_NEIGHBOR.USE_KNN and plan.config.CHECKPOINT.CHECKPOINT_FREQUENCY == -1
    hooks = [type(hook) for hook in build_hooks(plan)]
    assert hooks.count(type(HOOKS.get(name).build())) == 1


def test_knn_is_a_program_too():
    plan = _plan("engine_name=nearest_neighbor_test", "config.NEAREST_NEIGHBOR.USE_KNN=false")
    assert plan.config.TEST_ONLY and plan.config.NEAREST_NEIGHBOR.USE_KNN
    assert plan.config.NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES == 10**8


def test_an_svm_recipe_does_not_measure_knn_by_itself():
    words = [f"{SETTINGS}.EVAL_MODE_ON=true", f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true"]
    assert "config.SVM: is read by train_svm" in _refused(*words, "config.SVM.max_iter=100")
    assert "is read by cluster_features_and_label" in _refused(*words, "config.CLUSTERFIT.NUM_ITER=9")
    low_shot = "config.LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION.LAMBDA=1"
    assert "LOW_SHOT_BENCHMARK: is read by" in _refused(*words, low_shot)
    places = "config.GEO_LOCALIZATION.TRAIN_LABEL_MAPPING=a.json"
    assert "a program of VISSL that is not here" in _refused(*words, places)
    assert any("config.SVM.max_iter has no effect" in note for note in _plan("config.SVM.max_iter=100").notes)


def test_what_an_svm_cannot_do_is_refused():
    svm = ["engine_name=train_svm"]
    assert "SVMs are tested on them" in _refused(*svm, "config.DATA.TEST.DATA_SOURCES=[]")
    assert "config.SVM.penalty: must be l2 unless" in _refused(*svm, "config.SVM.penalty=l1")
    assert "config.SVM.dual: must be true" in _refused(*svm, "config.SVM.loss=hinge", "config.SVM.dual=false")
    assert "costs_list: must list a cost" in _refused(*svm, "config.SVM.costs.costs_list=[]")
    assert "two exponents" in _refused(*svm, "config.SVM.costs.base=2", "config.SVM.costs.power_range=[3]")
    assert "must list a number" in _refused("engine_name=train_svm_low_shot", "config.SVM.low_shot.k_values=[]")
    clusters = ["engine_name=cluster_features_and_label", LAYERS, "config.CLUSTERFIT.FEATURES.LAYER_NAME=res4"]
    assert "LAYER_NAME: must name the layer" in _refused(*clusters)
    assert "SVM_FEATURES_PATH" in _refused(*svm, "config.SVM_FEATURES_PATH=/features")
    assert "config.PROGRAM: must be train or" in _refused("config.PROGRAM=train_smv")


@pytest.mark.slow
def test_what_low_shot_cannot_do_is_refused() -> None:
    key, low_shot = "config.LOW_SHOT_BENCHMARK", "engine_name=low_shot_test"
    assert "METHOD: must be logistic_regression" in _refused(low_shot, f"{key}.METHOD=svm")
    for wrong in ("0", "[]", "[0.1,many]"):
        assert "LAMBDA: must be a number above 0" in _refused(low_shot, f"{key}.LOGISTIC_REGRESSION.LAMBDA={wrong}")
    assert "SEEDS: must list a seed" in _refused(low_shot, f"{key}.LOGISTIC_REGRESSION.SEEDS=[]")
    assert "classifiers are tested on them" in _refused(low_shot, "config.DATA.TEST.DATA_SOURCES=[]")
    assert _plan(low_shot, f"{key}.LOGISTIC_REGRESSION.LAMBDA=[1,0.1]").config.TEST_ONLY
    assert "must name weights" in _refused("engine_name=extract_cluster")


@pytest.mark.slow
def test_what_retrieval_cannot_do_is_refused(tmp_path: Path) -> None:
    key, retrieval = "config.IMG_RETRIEVAL", "engine_name=instance_retrieval_test"
    there = f"{key}.DATASET_PATH={tmp_path}"
    assert f"{key}.DATASET_PATH: must name the folder that holds Paris" in _refused(retrieval)
    assert "that of INSTRE is not" in _refused(retrieval, there, f"{key}.EVAL_DATASET_NAME=instre")
    rmac = [retrieval, there, f"{key}.FEATS_PROCESSING_TYPE=rmac"]
    assert "TRAIN_PCA_WHITENING: must be true" in _refused(*rmac, f"{key}.TRAIN_PCA_WHITENING=false")
    assert "must have one factor with rmac" in _refused(*rmac, f"{key}.IMG_SCALINGS=[1,0.5]")
    assert "IMG_SCALINGS: must list a factor" in _refused(retrieval, there, f"{key}.IMG_SCALINGS=[]")
    crop = [retrieval, there, f"{key}.CENTER_CROP=true"]
    assert "CROP_QUERY_ROI: must be false" in _refused(*crop, f"{key}.CROP_QUERY_ROI=true")
    assert "RESIZE_IMG: must be a side in pixels" in _refused(*crop, f"{key}.RESIZE_IMG=-1")
    assert "WHITEN_IMG_LIST: must name a list" in _refused(retrieval, there, f"{key}.TRAIN_DATASET_NAME=whitening")
    plan = _plan(*rmac, LAYERS, f"{key}.GEM_POOL_POWER=3", f"{key}.USE_FEATURE_EXTRACTION_ENGINE=true")
    settings = plan.config.MODEL.FEATURE_EVAL_SETTINGS
    assert [entry[0] for entry in settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP] == ["res3"]  # VISSL takes the first
    assert settings.SHOULD_FLATTEN_FEATS is False  # maps are pooled image by image
    assert any("GEM_POOL_POWER has no effect" in note for note in plan.notes)
    assert any("USE_FEATURE_EXTRACTION_ENGINE" in note for note in plan.notes)
    words = [f"{SETTINGS}.EVAL_MODE_ON=true", f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true", f"{key}.N_PCA=9"]
    assert "IMG_RETRIEVAL: is read by" in _refused(*words)


def test_programs_and_files_that_are_not_here_say_what_does_the_same(tmp_path: Path) -> None:
    assert "https://github.com/vpariza/open-hummingbird-eval" in _refused("engine_name=knn_segmentation")
    pixels = "config.DATA.TRAIN.DATASET_NAMES=[VOC2012_SEGMENTATION]"
    assert "must have a class for each image" in _refused(pixels)
    file = tmp_path / "config/detect.yaml"
    file.parent.mkdir()
    file.write_text("SOLVER: {BASE_LR: 0.02}\nMODEL: {META_ARCHITECTURE: GeneralizedRCNN}\n")
    with pytest.raises(ConfigError) as error:
        compose("detect", [f"hydra.searchpath=['file://{tmp_path}']"])
    assert [problem.must for problem in error.value.problems] == [
        "must name a recipe, and this is a configuration of Detectron2"
    ]
    assert account_of(recipe_file(file)).refused == list(error.value.problems)


def test_predictions_are_of_heads_that_have_weights(tmp_path: Path) -> None:
    name, eval_heads = "engine_name=extract_label_predictions", f"{SETTINGS}.EVAL_TRUNK_AND_HEAD=true"
    (tmp_path / "weights.torch").touch()
    weights = f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={tmp_path}/weights.torch"
    heads = "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [32, 10]}], [mlp, {dims: [128, 10]}]]"
    frozen = [f"{SETTINGS}.EVAL_MODE_ON=true", f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true", LAYERS, heads]
    assert "new heads predict nothing" in _refused(name)
    assert "EVAL_TRUNK_AND_HEAD: must be true" in _refused(name, weights, *frozen)
    plan = _plan(name, weights, eval_heads, *frozen)
    assert plan.config.TEST_ONLY and plan.config.LOSS["name"] == "CrossEntropyLoss"
    assert len(plan.config.MODEL.HEAD.PARAMS) == 2
    assert len(plan.config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP) == 2


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("frozen", ["FREEZE_TRUNK_ONLY", "FREEZE_TRUNK_AND_HEAD"])
def test_a_program_freezes_trunk_and_heads_and_looks_at_what_it_needs(program: str, frozen: str) -> None:
    run = RunConfig()
    settings = run.MODEL.FEATURE_EVAL_SETTINGS
    setattr(settings, frozen, True)
    begin_program(run, program)
    has_heads, with_head = program in (PREDICTIONS, ASSIGNMENTS), frozen == "FREEZE_TRUNK_AND_HEAD"
    assert program == run.PROGRAM and run.TEST_ONLY
    assert (program == "nearest_neighbor_test") == run.NEAREST_NEIGHBOR.USE_KNN
    assert (run.CHECKPOINT.CHECKPOINT_FREQUENCY, run.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY) == (-1, -1)
    assert (has_heads or not with_head) == settings.FREEZE_TRUNK_ONLY
    assert (with_head and not has_heads) == settings.FREEZE_TRUNK_AND_HEAD
    assert (not has_heads) == settings.EVAL_MODE_ON
    assert (not has_heads and not with_head) == settings.EXTRACT_TRUNK_FEATURES_ONLY


@pytest.mark.parametrize(
    ("program", "key"),
    [
        ("nearest_neighbor_test", "NEAREST_NEIGHBOR.FEATURES.PATH"),
        ("cluster_features_and_label", "CLUSTERFIT.FEATURES.PATH"),
        ("low_shot_test", "LOW_SHOT_BENCHMARK.FEATURES.PATH"),
    ],
)
def test_a_folder_of_features_does_not_stand_in_for_weights(program, key, tmp_path):
    words = [f"engine_name={program}", LAYERS, "config.CLUSTERFIT.FEATURES.LAYER_NAME=res3"]
    said = _refused(*words, f"config.{key}=features")
    assert said.startswith(f"config.{key}: cannot stand in for weights") and "PARAMS_FILE=<the weights" in said
    weights = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(1)}, weights)
    _plan(*words, f"config.{key}=features", f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={weights}")


def test_a_key_of_svms_is_listed_once():
    notes = " ".join(_plan("engine_name=low_shot_test", LAYERS, "config.SVM.low_shot.k_values=[1]").notes)
    assert notes.count("SVM.low_shot") == 1


def test_retrieval_reads_the_images_of_its_own_block_alone() -> None:
    run = compose("digits/simclr", [LAYERS, "config.DATA.TEST.DATA_SOURCES=[digits]"]).run
    run.IMG_RETRIEVAL.DATASET_PATH, run.IMG_RETRIEVAL.EVAL_DATASET_NAME = "/data", "oxford"
    run.IMG_RETRIEVAL.RESIZE_IMG = 64
    begin_program(run, RETRIEVAL)
    train, settings = run.DATA.TRAIN, run.MODEL.FEATURE_EVAL_SETTINGS
    assert (train.DATA_SOURCES, train.DATA_PATHS, run.DATA.TEST.DATA_SOURCES) == (["disk_folder"], ["/data/oxford"], [])
    assert [(entry["name"], entry.get("size", 64)) for entry in train.TRANSFORMS] == [
        (name, 64) for name in ("Resize", "CenterCrop", "ToTensor")
    ]
    assert [layer for layer, _ in settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP] == ["res3"]
