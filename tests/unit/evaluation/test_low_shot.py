"""Logistic regression on few images, and the nearest prototype of each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.blocks import data_block
from tests.unit.evaluation.example_run import NUM_TEST, NUM_TRAIN, make_config, make_plan
from vissl_zero.data.loader import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.clustering import ExtractClusters
from vissl_zero.evaluation.linear_classifiers import LowShot, logistic_top1

# What ``run_low_shot_logistic_regression`` of VISSL's vissl/utils/low_shot_utils.py at 09270ed2 gives of these digits:
# C = 1 / (lambda / 60), features standardized by the first 60 images'.
VISSL = {1.0: (1.0, 0.709), 0.01: (1.0, 0.712)}


def test_the_classifier_is_vissl_s():
    rows, labels = load_digits(return_X_y=True)
    for penalty, wanted in VISSL.items():
        found = logistic_top1(rows[:60], labels[:60], rows[60:1060], labels[60:1060], penalty)
        assert found == pytest.approx(wanted, abs=0.0005)


def _run(config: dict[str, Any], folder: Any, hook: Any) -> Any:
    run, schedules, frozen = build_run(make_plan(config, folder), torch.device("cpu"))
    train(run, schedules, frozen, [AccuracyHook(), hook])
    return run


def test_each_seed_draws_images_of_its_own(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    config["DATA"]["TRAIN"]["DATA_LIMIT_SAMPLING"]["IS_BALANCED"] = True
    config["PROGRAM"] = "low_shot_test"
    config["LOW_SHOT_BENCHMARK"]["LOGISTIC_REGRESSION"] |= {"LAMBDA": [1.0, 0.1], "SEEDS": [0, 5]}
    results = _run(config, tmp_path, LowShot()).results
    assert "top1" not in results  # features are no classes
    rows = results["low_shot_by_layer"]["trunk"]
    seeds = rows["seeds"]
    assert [*seeds] == ["0", "5"] and [*seeds["0"]["top1_by_lambda"]] == ["1.0", "0.1"]
    best = [of["top1"] for of in seeds.values()]
    assert best == [max(pair[1] for pair in of["top1_by_lambda"].values()) for of in seeds.values()]
    assert best[0] != best[1] and rows["mean"] == pytest.approx(np.mean(best)) and rows["std"] > 0
    config["LOW_SHOT_BENCHMARK"]["LOGISTIC_REGRESSION"]["SEEDS"] = [5]
    again = _run(config, tmp_path, LowShot()).results["low_shot_by_layer"]["trunk"]
    assert again["seeds"]["5"] == seeds["5"]
    config["DATA"]["TEST"] |= {"DATA_SOURCES": []}
    with pytest.raises(DataError, match="tested on TEST's images"):
        _run(config, tmp_path, LowShot())


def test_each_image_gets_its_nearest_prototype(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"], config["PROGRAM"] = True, "extract_cluster"
    config["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "num_clusters": [5, 3]}]]
    run = _run(config, tmp_path, ExtractClusters())
    assert [*run.results["clusters"]] == ["TRAIN", "TEST"]
    for split, count in (("TRAIN", NUM_TRAIN), ("TEST", NUM_TEST)):
        images, labels = (np.load(file) for file in run.results["clusters"][split])
        assert len(images) == len(labels) == count
    source = build_eval_images(data_block(config["DATA"]), 3)[1]
    (crop,) = source.transform(source.source.image(7))
    with torch.no_grad():
        (output,) = run.sharded.model.eval()([crop[None].double()])
    assert labels[7] == output.scores[0].argmax() and images[7] == source.source.name(7) and labels.max() < 5
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [32, 10]}]]
    with pytest.raises(ConfigError, match="must begin with a swav_head"):
        _run(config, tmp_path, ExtractClusters())
