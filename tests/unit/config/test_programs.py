"""VISSL's programs: a recipe that is given to one trains nothing, and what a program reads is read by it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.config.compose import compose
from vissl_zero.config.host import Host
from vissl_zero.config.recipe_files import recipe_file, recipe_files
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import ConfigError
from vissl_zero.registry import HOOKS
from vissl_zero.reporting.hooks import build_hooks

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
    settings = plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]
    assert plan.config["TEST_ONLY"] and plan.config["PROGRAM"] == name
    assert [entry[0] for entry in settings["LINEAR_EVAL_FEAT_POOL_OPS_MAP"]] == ["res3", "res5avg"]
    assert not plan.config["NEAREST_NEIGHBOR"]["USE_KNN"] and plan.config["CHECKPOINT"]["CHECKPOINT_FREQUENCY"] == -1
    hooks = [type(hook) for hook in build_hooks(plan)]
    assert hooks.count(type(HOOKS.get(name).build())) == 1


def test_the_saved_recipe_names_its_program():
    composed = compose("digits/simclr", ["engine_name=train_svm"])
    assert "PROGRAM: train_svm" in composed.user_yaml()
    assert compose("digits/simclr", ["config.PROGRAM=train_svm"]).run == composed.run


def test_knn_is_a_program_too():
    plan = _plan("engine_name=nearest_neighbor_test", "config.NEAREST_NEIGHBOR.USE_KNN=false")
    assert plan.config["TEST_ONLY"] and plan.config["NEAREST_NEIGHBOR"]["USE_KNN"]
    assert plan.config["NEAREST_NEIGHBOR"]["MAX_TRAIN_IMAGES"] == 10**8


def test_an_svm_recipe_does_not_measure_knn_by_itself():
    words = [f"{SETTINGS}.EVAL_MODE_ON=true", f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true"]
    assert "config.SVM: is read by train_svm" in _refused(*words, "config.SVM.max_iter=100")
    assert "config.CLUSTERFIT: is read by cluster_features_and_label" in _refused(
        *words, "config.CLUSTERFIT.NUM_ITER=9"
    )
    low_shot = "config.LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION.LAMBDA=1"
    assert "config.LOW_SHOT_BENCHMARK: is read by a program of VISSL that is not here" in _refused(*words, low_shot)
    assert any("config.SVM.max_iter has no effect" in note for note in _plan("config.SVM.max_iter=100").notes)


def test_what_an_svm_cannot_do_is_refused():
    svm = ["engine_name=train_svm"]
    assert "must name images: SVMs are tested on them" in _refused(*svm, "config.DATA.TEST.DATA_SOURCES=[]")
    assert "config.SVM.penalty: must be l2 unless" in _refused(*svm, "config.SVM.penalty=l1")
    assert "config.SVM.dual: must be true" in _refused(*svm, "config.SVM.loss=hinge", "config.SVM.dual=false")
    assert "config.SVM.costs.costs_list: must list a cost" in _refused(*svm, "config.SVM.costs.costs_list=[]")
    assert "two exponents" in _refused(*svm, "config.SVM.costs.base=2", "config.SVM.costs.power_range=[3]")
    assert "must list a number" in _refused("engine_name=train_svm_low_shot", "config.SVM.low_shot.k_values=[]")
    clusters = ["engine_name=cluster_features_and_label", LAYERS, "config.CLUSTERFIT.FEATURES.LAYER_NAME=res4"]
    assert "LAYER_NAME: must name the layer: res3, res5avg (got 'res4')" in _refused(*clusters)
    assert "SVM_FEATURES_PATH" in _refused(*svm, "config.SVM_FEATURES_PATH=/features")
    assert "config.PROGRAM: must be train or" in _refused("config.PROGRAM=train_smv")


def test_a_file_says_which_program_it_is_for(tmp_path: Path) -> None:
    body = (
        "config: {{MODEL: {{TRUNK: {{NAME: resnet}}}}, DATA: {{TRAIN: {{DATA_SOURCES: [disk_folder]}}}}, SVM: {svm}}}"
    )
    wanted = {"svm": ("{normalize: true}", "train_svm"), "low": ("{low_shot: {k_values: [1]}}", "train_svm_low_shot")}
    for name, (block, _) in wanted.items():
        file = tmp_path / "config" / name / "eval.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(body.format(svm=block))
    for name, (_, program) in wanted.items():
        found = recipe_file(tmp_path / "config" / name / "eval.yaml")
        assert found.program == program and f"engine_name={program}" in found.overrides
    assert {recipe.program for recipe in recipe_files(tmp_path / "config")} == {"train_svm", "train_svm_low_shot"}


def test_predictions_are_of_heads_that_have_weights(tmp_path: Path) -> None:
    name, eval_heads = "engine_name=extract_label_predictions", f"{SETTINGS}.EVAL_TRUNK_AND_HEAD=true"
    (tmp_path / "weights.torch").touch()
    weights = f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={tmp_path}/weights.torch"
    heads = "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [32, 10]}], [mlp, {dims: [128, 10]}]]"
    frozen = [f"{SETTINGS}.EVAL_MODE_ON=true", f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true", LAYERS, heads]
    assert "must name weights: new heads predict nothing" in _refused(name)
    assert "EVAL_TRUNK_AND_HEAD: must be true" in _refused(name, weights, *frozen)
    plan = _plan(name, weights, eval_heads, *frozen)
    assert plan.config["TEST_ONLY"] and plan.config["LOSS"]["name"] == "CrossEntropyLoss"
    assert len(plan.config["MODEL"]["HEAD"]["PARAMS"]) == 2
    assert len(plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]["LINEAR_EVAL_FEAT_POOL_OPS_MAP"]) == 2
