"""Supervised top-1 on TEST."""

from __future__ import annotations

import pytest
import torch

from tests.unit.evaluation.example_run import NUM_TEST, make_config, make_plan
from vissl_zero.data.eval_images import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.rehearsal import rehearse
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import AccuracyHook, top1
from vissl_zero.losses.criterion import Criterion


def test_top1_is_the_share_of_right_answers():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    AccuracyHook().on_end(run)
    images = build_eval_images(run.plan.config["DATA"], run.plan.seed)[1]
    right = 0
    for index in range(NUM_TEST):
        (crop,) = images.transform(images.source.image(index))
        with torch.no_grad():
            logits = run.sharded.model.eval()([crop[None].double()])[0]
        right += int(logits.argmax()) == images.source.label(index)
    assert run.results["top1"] == right / NUM_TEST


def test_an_ignored_label_does_not_count():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    images = build_eval_images(run.plan.config["DATA"], run.plan.seed)[1]
    everything = top1(run, images, ignored_label=-1)
    labels = [images.source.label(index) for index in range(NUM_TEST)]
    without = [top1(run, images, ignored_label=label) for label in range(10)]
    # Each image is left out once: the right answers add up to nine times as many.
    counted = [share * (NUM_TEST - labels.count(label)) for label, share in enumerate(without)]
    assert abs(sum(counted) - 9 * everything * NUM_TEST) < 1e-9


def test_other_losses_have_no_top1():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    run.criterion = Criterion()
    AccuracyHook().on_end(run)
    assert "top1" not in run.results


def test_images_that_cannot_be_evaluated_on_are_found_before_training():
    config = make_config()
    config["DATA"]["TEST"]["TRANSFORMS"] = [{"name": "Resize", "size": "small"}, {"name": "ToTensor"}]
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"config\.DATA\.TEST\.TRANSFORMS\.Resize"):
        AccuracyHook().on_start(run)
    with pytest.raises(ConfigError, match=r"config\.DATA\.TEST\.TRANSFORMS\.Resize"):
        rehearse(run.plan)
