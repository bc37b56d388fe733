"""SVMs on features: VISSL's figures on the same numbers, labels of several kinds, the hooks on a real run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_iris

from tests.blocks import data_block, svm_block
from tests.unit.evaluation.example_run import NUM_TEST, make_config, make_plan
from vissl_zero.data.source import build_eval_sources, label_matrix
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import DataError
from vissl_zero.evaluation.linear_classifiers import (
    TrainSvm,
    TrainSvmLowShot,
    average_precision,
    average_precision_of,
    draw,
    low_shot,
    normalized,
    train_class,
)

LAYER = "conv1 AdaptiveAvgPool2d[[2, 2]]"
OPTIONS: dict[str, Any] = {
    "loss": "squared_hinge",
    "penalty": "l2",
    "dual": False,  # no draws in the solver
    "max_iter": 2000,
    "cross_val_folds": 3,
    "costs": {"costs_list": [0.1, 1.0, 10.0], "base": 2.0, "power_range": [4, 6]},
}


@pytest.fixture(scope="module")
def iris() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every other flower for training, the rest for testing; some labels do not count."""
    rows, classes = load_iris(return_X_y=True)
    matrix = np.eye(3, dtype=np.int8)[classes]
    matrix[5::10, 1] = -1
    return normalized(rows[::2]), matrix[::2], normalized(rows[1::2]), matrix[1::2]


def test_figures_are_vissl_s(iris):
    """SVMTrainer of vissl/utils/svm_utils/svm_trainer.py at 09270ed2, on the same rows and labels."""
    rows, labels, test, test_labels = iris
    svms = [train_class(rows, labels[:, column], svm_block(OPTIONS), 0) for column in range(3)]
    assert [svm.cost for svm in svms] == [0.1, 32.0, 1.0] and all(svm.is_converged for svm in svms)
    wanted = [0.5159786423459799, 0.5578742467415844, 0.6690122446622873, 0.7103406752712308, 0.7622054567316005]
    assert svms[1].average_precisions == pytest.approx(wanted, abs=1e-12)
    assert svms[2].average_precisions == pytest.approx([0.9932659932659934, 1, 1, 1, 1], abs=1e-12)
    found = [average_precision_of(svm, test, test_labels[:, column]) for column, svm in enumerate(svms)]
    assert found == pytest.approx([1.0, 0.8444875776397516, 0.9861538461538466], abs=1e-12)


def test_low_shot_figures_are_vissl_s(iris):
    """SVMLowShotTrainer of svm_low_shot_trainer.py at 09270ed2, on the labels that are drawn here."""
    rows, labels, test, test_labels = iris
    few = draw(labels, 4, "voc", np.random.default_rng([0, 1, 4]))
    assert [(few == 1).sum(axis=0).tolist(), (few == 0).sum(axis=0).tolist()] == [[4] * 3, [8] * 3]
    assert ((few == -1) | (few == labels)).all()
    options = OPTIONS | {"costs": {"costs_list": [0.1, 1.0, 10.0], "base": -1.0, "power_range": [4, 6]}}
    wanted = [0.8261538461538463, 0.8304273504273506, 0.8849274508386352]
    assert low_shot(rows, few, test, test_labels, svm_block(options), 0) == pytest.approx(wanted, abs=1e-12)


def test_average_precision_is_the_area_under_the_envelope():
    labels, scores = np.array([1, 0, 1, 0, 0]), np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    assert average_precision(labels, scores) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert average_precision(labels, -scores) == pytest.approx(0.4)
    assert np.isnan(average_precision(0 * labels, scores))


def test_draws_differ_and_ask_for_no_more_than_there_is():
    one_class_each = np.eye(2, dtype=np.int8)[[0, 0, 0, 1, 1]]
    few = draw(one_class_each, 2, "places205", np.random.default_rng(0))
    assert (few == 1).sum(axis=0).tolist() == [2, 2] and (few == 0).sum(axis=0).tolist() == [2, 2]
    with pytest.raises(DataError, match="3 needs 3 images of class 1"):
        draw(one_class_each, 3, "places205", np.random.default_rng(0))
    draws = [draw(one_class_each, 1, "voc", np.random.default_rng([0, n])).tolist() for n in range(8)]
    assert any(other != draws[0] for other in draws)


def _config(**svm: Any) -> dict[str, Any]:
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, 1]}]]
    config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= {
        "EVAL_MODE_ON": True,
        "FREEZE_TRUNK_ONLY": True,
        "EXTRACT_TRUNK_FEATURES_ONLY": True,
        "LINEAR_EVAL_FEAT_POOL_OPS_MAP": [
            ["conv1", ["AdaptiveAvgPool2d", [[2, 2]]]],
            ["conv1", ["AdaptiveMaxPool2d", [[1, 1]]]],
            ["res5avg", ["Identity", []]],
        ],
    }
    config["SVM"]["costs"]["costs_list"] = [0.1, 10.0]
    config["SVM"] |= {"cross_val_folds": 2, "dual": False, **svm}
    return config


def _measure(hook: Any, config: dict[str, Any], folder: Any) -> dict[str, Any]:
    run, schedules, frozen = build_run(make_plan(config, folder), torch.device("cpu"))
    train(run, schedules, frozen, [hook])
    return run.results


def test_a_run_measures_each_layer_and_writes_its_classifiers(tmp_path, capsys):
    results = _measure(TrainSvm(), _config(), tmp_path)
    layers = [LAYER, "conv1 AdaptiveMaxPool2d[[1, 1]]", "res5avg"]
    assert [*results["svm_map_by_layer"]] == layers and "SVM on res5avg: mean average" in capsys.readouterr().out
    assert results["svm_map_by_layer"][LAYER] > 0.5 and results["svm_top1_by_layer"][LAYER] > 0.4
    folder = tmp_path / "svm" / LAYER
    aps = np.load(folder / "test_ap.npy")
    assert aps.shape == (10, 1) and np.nanmean(aps) == pytest.approx(results["svm_map_by_layer"][LAYER], abs=1e-12)
    assert np.load(folder / "crossval_ap.npy").shape == (10, 2)
    assert {*np.load(folder / "chosen_cost.npy").tolist()} <= {0.1, 10.0}
    assert load_file(folder / "classifiers.safetensors")["weight"].shape == (10, 8 * 4)


def test_low_shot_of_a_run(tmp_path):
    low = {"dataset_name": "places205", "sample_inds": [1, 2], "k_values": [1, 2]}
    results = _measure(TrainSvmLowShot(), _config(low_shot=low, cls_list=[0, 3, 7]), tmp_path)
    rows = results["svm_low_shot_by_layer"][LAYER]
    assert [*rows] == ["k=1", "k=2"] and rows["k=2"]["min"] <= rows["k=2"]["mean"] <= rows["k=2"]["max"]
    means = np.load(tmp_path / "svm" / LAYER / "test_ap_mean.npy")
    assert means.shape == (2, 2) and means[0].max() == pytest.approx(rows["k=1"]["mean"])


def test_several_labels_an_image_are_read_from_a_matrix(tmp_path):
    """VOC07's label files, (N, 20) in VISSL, are the SVMs' labels as they are."""
    config, all_images = _config(), make_config()["DATA"]
    data = config["DATA"]
    for split in ("TRAIN", "TEST"):
        all_images[split]["DATA_LIMIT"] = -1
    for split, source in zip(("TRAIN", "TEST"), build_eval_sources(data_block(all_images), 3), strict=True):
        digits = np.array([source.label(index) for index in range(len(source))])
        matrix = np.stack([digits % 2, digits > 4, digits < 3], axis=1).astype(np.int64)
        matrix[::7, 0] = -1
        np.save(tmp_path / f"{split}.npy", matrix)
        data[split] |= {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [str(tmp_path / f"{split}.npy")]}
    train_source, test_source = build_eval_sources(data_block(data), 3)
    assert test_source is not None and train_source.label(0) is None and train_source.class_names == ()
    chosen = label_matrix(test_source)
    assert chosen is not None and chosen.shape == (NUM_TEST, 3) and {*chosen.flat} == {-1, 0, 1}
    results = _measure(TrainSvm(), config, tmp_path)
    assert results["svm_map_by_layer"][LAYER] > 0.7 and "svm_top1_by_layer" not in results
    assert np.load(tmp_path / "svm" / LAYER / "test_ap.npy").shape == (3, 1)
    np.save(tmp_path / "TEST.npy", np.load(tmp_path / "TEST.npy")[:, :2])
    with pytest.raises(DataError, match="labels of 3 classes, TEST of 2"):
        _measure(TrainSvm(), config, tmp_path)
    np.save(tmp_path / "TRAIN.npy", np.load(tmp_path / "TRAIN.npy") * 2)
    with pytest.raises(DataError, match="each must be 1, 0 or -1"):
        build_eval_sources(data_block(data), 3)


def test_what_nothing_can_be_learnt_from_is_refused(tmp_path):
    with pytest.raises(DataError, match="cross validation needs 40 of each"):
        _measure(TrainSvm(), _config(cross_val_folds=40), tmp_path)
    with pytest.raises(DataError, match="must name classes below 10, not 12"):
        _measure(TrainSvm(), _config(cls_list=[12]), tmp_path)
    with pytest.raises(DataError, match="500 needs 500 images of class 0"):
        _measure(TrainSvmLowShot(), _config(low_shot=_config()["SVM"]["low_shot"] | {"k_values": [500]}), tmp_path)
