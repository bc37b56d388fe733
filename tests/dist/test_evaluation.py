"""Evaluation gives the same figures on any number of ranks and at any level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.blocks import data_block
from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from tests.unit.evaluation.example_segmentation import make_segmentation_config
from tests.unit.evaluation.test_patch_pictures import make_transformer_config
from vissl_zero.data.loader import build_eval_images
from vissl_zero.data.source import build_eval_sources
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.features import Features, extract_features
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.evaluation.pictures import PatchPictures, patch_pictures
from vissl_zero.evaluation.segmentation import SegmentationHook


def _evaluate(level: int, world_size: int, max_steps: int) -> tuple[Features, dict[str, Any], list[list[int]]]:
    config = make_config(ALSO_TOPK=[1, 9], ALSO_SIGMA=[1.0], LIDAR_IMAGES=7, LIDAR_VIEWS=3)
    plan = make_plan(config, level=level, world_size=world_size, max_steps=max_steps)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hook = KnnHook(plan)
    train(run, schedules, frozen, [hook, AccuracyHook()])
    images, _ = build_eval_images(plan.config.DATA, plan.seed)
    features = extract_features(run, images, with_pixels=True)
    assert hook.neighbors_after is not None
    return features, run.results, hook.neighbors_after.neighbor_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "world_size", "max_steps"),
    [(0, 2, 3), (2, 2, 3), (3, 2, 3), (3, 3, 0), (0, 3, 0)],  # 16 images a step do not divide by 3: no training there
)
def test_the_same_on_every_rank_and_as_in_one_process(level: int, world_size: int, max_steps: int) -> None:
    (wanted,) = run_on_ranks(1, _evaluate, 0, 1, max_steps)
    for features, results, neighbors in run_on_ranks(world_size, _evaluate, level, world_size, max_steps):
        torch.testing.assert_close(features.rows, wanted[0].rows, rtol=0, atol=1e-10)
        assert torch.equal(features.labels, wanted[0].labels)
        assert torch.equal(features.pixels, wanted[0].pixels)
        assert results.keys() == wanted[1].keys()
        for name, value in wanted[1].items():
            close = {"rankme_before": 1e-10, "rankme_after": 1e-10, "lidar": 1e-5}.get(name)
            assert results[name] == (pytest.approx(value, rel=close) if close else value), name
        assert neighbors == wanted[2]


def _pictures(level: int, world_size: int) -> list[PatchPictures]:
    config = make_transformer_config()
    run, _, _ = build_run(make_plan(config, level=level, world_size=world_size), torch.device("cpu"))
    source, _ = build_eval_sources(data_block(config["DATA"]), run.plan.seed)
    return patch_pictures(run, source, [0, 5])


@pytest.mark.slow
def test_pictures_of_patches_are_the_same_at_level_3() -> None:
    wanted = run_on_ranks(1, _pictures, 0, 1)[0]
    for found in run_on_ranks(2, _pictures, 3, 2):
        for one, other in zip(wanted, found, strict=True):
            assert np.abs(one.components.astype(int) - other.components).max() <= 1
            assert np.abs(one.attention.astype(int) - other.attention).max() <= 1


def _layers(level: int, world_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Probes of three layers of a frozen trunk, trained for three steps: figures and all weights."""
    config = make_config(USE_KNN=False)
    taps = [["conv1", ["AdaptiveAvgPool2d", [[2, 2]]]], ["stages.0.0", ["Identity", []]], ["flatten", ["Identity", []]]]
    settings = {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True, "SHOULD_FLATTEN_FEATS": False}
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= settings | {"LINEAR_EVAL_FEAT_POOL_OPS_MAP": taps}
    probe = ["eval_mlp", {"in_channels": 8, "dims": [32, 10]}]
    config["MODEL"]["HEAD"]["PARAMS"] = [probe, ["eval_mlp", {"in_channels": 8, "dims": [128, 10]}], _LAST]
    config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]
    plan = make_plan(config, level=level, world_size=world_size, max_steps=3)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [AccuracyHook()])
    return run.results, {name: tensor.clone() for name, tensor in run.sharded.full_state().items()}


_LAST = ["mlp", {"dims": [32, 10]}]


@pytest.mark.slow
def test_probes_of_layers_are_the_same_at_every_level() -> None:
    ((wanted, state),) = run_on_ranks(1, _layers, 0, 1)
    assert len(wanted["top1_by_layer"]) == 3
    for level in (0, 3):
        for results, other in run_on_ranks(2, _layers, level, 2):
            assert results == wanted
            if other:  # rank 0 has the whole state
                assert other.keys() == state.keys()
                for name, tensor in state.items():
                    torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-10)


def _overlaps(level: int, world_size: int, batch: int) -> dict[str, Any]:
    """Of a segmentation trained for three steps; 31 test images leave some ranks without one in the last batch."""
    changes = {"max_steps": 3, "batch_per_rank": batch // world_size}
    plan = make_plan(make_segmentation_config(), level=level, world_size=world_size, **changes)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [SegmentationHook()])
    return run.results


@pytest.mark.slow
def test_overlaps_of_classes_are_the_same_on_every_rank() -> None:
    for world_size, level, batch in ((2, 1, 10), (2, 3, 10), (3, 0, 15), (3, 3, 15)):
        wanted = run_on_ranks(1, _overlaps, 0, 1, batch)[0]
        assert 0 < wanted["miou"] < 1
        for results in run_on_ranks(world_size, _overlaps, level, world_size, batch):
            assert results == wanted
