"""Files of what a classifier predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.blocks import data_block
from tests.unit.evaluation.example_run import NUM_TEST, NUM_TRAIN, make_config, make_plan
from vissl_zero.data.loader import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.evaluation.feature_files import ExtractLabelPredictions


def test_predictions_are_the_head_s_in_the_order_of_the_images(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    train(run, schedules, frozen, [ExtractLabelPredictions()])
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        found = {
            kind: np.load(tmp_path / "label_predictions" / f"rank0_{split}_heads_{kind}.npy")
            for kind in ("predictions", "conf_scores", "targets", "inds", "images", "labels")
        }
        assert [len(array) for array in found.values()] == [count] * 6 and found["predictions"].shape[1] == 5
    images = build_eval_images(data_block(config["DATA"]), 3)[1]
    (crop,) = images.transform(images.source.image(7))
    with torch.no_grad():
        (logits,) = run.sharded.model.eval()([crop[None].double()])
    assert found["conf_scores"][7] == pytest.approx(logits[0].softmax(dim=0).numpy(), abs=1e-6)
    assert found["predictions"][7].tolist() == logits[0].topk(5).indices.tolist()
    assert found["labels"][7] == logits[0].argmax() and found["targets"][7].tolist() == [images.source.label(7)]


def test_a_broken_image_has_no_prediction_under_its_name(tmp_path):
    numbers = np.random.default_rng(0)
    for split in ("train", "test"):
        for index in range(16 if split == "train" else 8):
            path = tmp_path / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    (tmp_path / "test/a/2.png").write_bytes(b"no image")
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"], config["DATA"]["ON_BROKEN_IMAGE"] = True, "skip"
    for split in ("TRAIN", "TEST"):
        paths = {"DATA_SOURCES": ["disk_folder"], "DATA_PATHS": [str(tmp_path / split.lower())], "DATA_LIMIT": -1}
        config["DATA"][split] |= paths
    run, schedules, frozen = build_run(make_plan(config, tmp_path / "run"), torch.device("cpu"))
    train(run, schedules, frozen, [ExtractLabelPredictions()])
    images, inds, targets = (
        np.load(tmp_path / "run/label_predictions" / f"rank0_test_heads_{kind}.npy")
        for kind in ("images", "inds", "targets")
    )
    assert [path.split("/")[-1] for path in images] == ["0.png", "4.png", "6.png", "1.png", "3.png", "5.png", "7.png"]
    assert inds.tolist() == [0, 2, 3, 4, 5, 6, 7] and targets[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_scores_that_are_nan_are_not_written(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    with torch.no_grad():
        next(run.sharded.model.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match=f"The scores of {NUM_TRAIN} of {NUM_TRAIN} images are NaN or infinite"):
        train(run, schedules, frozen, [ExtractLabelPredictions()])
    assert not (tmp_path / "label_predictions").exists()


def test_heads_that_are_no_classifiers_are_refused(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    config["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "num_clusters": [5]}]]
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    with pytest.raises(ConfigError, match="must be classifiers"):
        train(run, schedules, frozen, [ExtractLabelPredictions()])
