"""kNN around a real training run."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from tests.unit.evaluation.example_run import NUM_TRAIN, make_config, make_plan
from vissl_zero.data.source import Subset
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.knn import KnnHook, thinned
from vissl_zero.evaluation.pictures import middles


def trained(config, **changes):
    """The run and its kNN hook after training."""
    plan = make_plan(config, **changes)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hook = KnnHook(plan)
    train(run, schedules, frozen, [hook, AccuracyHook()])
    return run, hook


def test_before_after_and_between():
    run, hook = trained(make_config(EVERY_NUM_EPOCHS=1))
    results = run.results
    assert [step for step, _ in hook.curve] == [0, 4, 8]
    assert results["knn_top1_by_step"] == [list(point) for point in hook.curve]
    assert results["knn_top1_before"] == hook.curve[0][1]
    assert results["knn_top1_after"] == hook.curve[2][1]
    assert "knn_top1_latest" not in results
    assert 0.5 < results["knn_top1_raw_pixels"] <= 1.0
    assert 0.0 <= results["top1"] <= 1.0
    assert run.sharded.model.training


def test_neighbors_are_of_the_right_images():
    _, hook = trained(make_config(), max_steps=2)
    for found in (hook.neighbors_before, hook.neighbors_after):
        assert found.query_ids == [2, 7, 12, 18, 23, 28]
        for query, neighbors, matches in zip(found.query_ids, found.neighbor_ids, found.matches, strict=True):
            label = found.query_source.label(query)
            assert matches == [found.index_source.label(neighbor) == label for neighbor in neighbors]
            assert len(set(neighbors)) == 5
    assert hook.neighbors_before.neighbor_ids != hook.neighbors_after.neighbor_ids


def test_nothing_is_measured_when_it_is_off():
    run, hook = trained(make_config(USE_KNN=False), max_steps=1)
    assert "knn_top1_after" not in run.results
    assert hook.neighbors_after is None


def test_measuring_changes_nothing_in_training():
    plain, _ = trained(make_config(USE_KNN=False))
    measured, _ = trained(make_config(EVERY_NUM_EPOCHS=1))
    assert [record.loss for record in measured.records] == [record.loss for record in plain.records]


def test_most_images_are_kept_to_and_spread_evenly():
    _, hook = trained(make_config(MAX_TRAIN_IMAGES=20, MAX_TEST_IMAGES=3), max_steps=1)
    assert len(hook.neighbors_after.index_source) == 20
    assert hook.neighbors_after.query_ids == [0, 1, 2]
    source = hook.neighbors_after.index_source
    assert isinstance(source, Subset)
    assert thinned(source, 20) is source
    assert middles(10, 3) == [1, 5, 8]
    assert middles(2, 3) == [0, 1]


def test_without_test_images_of_train_are_asked_about():
    config = make_config()
    config["DATA"]["TEST"]["DATA_SOURCES"] = []
    run, hook = trained(config, max_steps=1)
    assert 0.5 < run.results["knn_top1_raw_pixels"] < 1.0  # an image found as its own neighbor would give 1
    found = hook.neighbors_after
    assert len(found.query_source) == NUM_TRAIN
    own = [found.query_source.indices[query] for query in found.query_ids]
    assert all(place not in neighbors for place, neighbors in zip(own, found.neighbor_ids, strict=True))
    assert run.results["top1"] is None


@pytest.fixture
def photos(tmp_path):
    """One flat folder of unlabeled images."""
    for index in range(20):
        Image.new("RGB", (8, 8), (index * 12, 255 - index * 12, 90)).save(tmp_path / f"{index:02}.png")
    return tmp_path


def test_unlabeled_photos_have_neighbors_but_no_figures(photos):
    config = make_config()
    config["DATA"]["TRAIN"] |= {"DATA_SOURCES": ["disk_folder"], "DATA_PATHS": [str(photos)], "DATA_LIMIT": -1}
    config["DATA"]["TEST"]["DATA_SOURCES"] = []
    config["NEAREST_NEIGHBOR"]["EVERY_NUM_EPOCHS"] = 1
    plan = make_plan(config)
    run, _, _ = build_run(plan, torch.device("cpu"))
    hook = KnnHook(plan)
    hook.on_start(run)  # no training: the loss here needs labels
    hook.on_epoch_end(run)
    hook.on_end(run)
    assert run.results["knn_top1_before"] is run.results["knn_top1_after"] is run.results["knn_top1_raw_pixels"] is None
    assert hook.curve == []
    assert "knn_top1_by_step" not in run.results
    assert hook.neighbors_after.matches is None
    assert len(hook.neighbors_after.neighbor_ids) == 6
