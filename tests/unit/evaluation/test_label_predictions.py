"""Files of what a classifier predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.blocks import data_block
from tests.unit.evaluation.example_run import NUM_TEST, NUM_TRAIN, make_config, make_plan
from vissl_zero.data.loader import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
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


def test_heads_that_are_no_classifiers_are_refused(tmp_path):
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    config["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "num_clusters": [5]}]]
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    with pytest.raises(ConfigError, match="must be classifiers"):
        train(run, schedules, frozen, [ExtractLabelPredictions()])
