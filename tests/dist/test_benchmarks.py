"""Linear probes and feature files: the same trunk, classifier and features at every level and number of ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.blocks import model_block
from tests.ranks import run_on_ranks
from tests.unit.commands.example_checkpoint import state_of, write_checkpoint
from tests.unit.evaluation.example_retrieval import make_revisited, retrieval_config
from tests.unit.evaluation.example_run import NUM_TEST, NUM_TRAIN, make_config, make_plan
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.data.loader import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError, DataError
from vissl_zero.evaluation import feature_files
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.clustering import kmeans, nearest_centroids
from vissl_zero.evaluation.feature_files import ExtractFeatures, read_features
from vissl_zero.evaluation.features import extract_features
from vissl_zero.evaluation.linear_classifiers import TrainSvm
from vissl_zero.evaluation.retrieval_hook import InstanceRetrieval
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model


def _config(weights: str, **settings: Any) -> dict[str, Any]:
    config = make_config()
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, 10]}]]
    config["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] = weights
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True, **settings}
    config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]  # as resolved
    return config


def _probe(
    level: int, world_size: int, weights: str, folder: str, engine: str = "torch"
) -> tuple[dict[str, Tensor], Any, Tensor]:
    """Train a linear probe; full weights at the end (on rank 0), results, features of TRAIN."""
    plan = make_plan(_config(weights), folder=folder, level=level, world_size=world_size, max_steps=6)
    plan = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, engine=engine))
    feature_files._ROWS_PER_SHARD = 16
    run, schedules, frozen = build_run(plan, torch.device("cpu"), lambda model: load_first_weights(model, plan))
    train(run, schedules, frozen, [AccuracyHook(), ExtractFeatures()])
    images, _ = build_eval_images(plan.config.DATA, plan.seed)
    rows = extract_features(run, images).rows
    return run.sharded.full_state(), run.results, rows


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of three ranks, with a SwAV head and running statistics that are not as new."""
    config = make_config()
    config["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "num_clusters": [5]}]]
    model = build_model(model_block(config["MODEL"]))
    initialize_(model, seed=11)
    for index, (name, buffer) in enumerate(model.named_buffers()):
        # Means near 0, or no activation would survive the ReLUs and all features would be zero.
        if "running" in name:
            drawn = torch.rand(buffer.shape, generator=torch.Generator().manual_seed(index))
            buffer.copy_(drawn + 0.5 if name.endswith("var") else 0.1 * (drawn - 0.5))
    folder = tmp_path_factory.mktemp("pretrained")
    write_checkpoint(folder, state_of(model))
    return folder, model.state_dict()


@pytest.fixture(scope="module")
def alone(pretrained, tmp_path_factory):
    """The probe in one process without sharding."""
    folder = tmp_path_factory.mktemp("alone")
    (result,) = run_on_ranks(1, _probe, 0, 1, str(pretrained[0]), str(folder))
    return (*result, folder)


@pytest.mark.parametrize(("level", "engine"), [*((level, "torch") for level in range(4)), (2, "fairscale")])
def test_a_probe_is_the_same_at_every_level(level, engine, pretrained, alone, tmp_path):
    world_size = 2
    state, results, rows, folder = alone
    weights, trained = str(pretrained[0]), pretrained[1]
    ranks = run_on_ranks(world_size, _probe, level, world_size, weights, str(tmp_path), engine)
    found = ranks[0][0]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-10)
        if name.startswith("trunk."):
            assert torch.equal(tensor, trained[name].to(tensor.dtype)), name
    untrained = build_model(model_block(_config(weights)["MODEL"]))
    initialize_(untrained, seed=3)
    moved = found["heads.0.clf.0.weight"] - untrained.get_parameter("heads.0.clf.0.weight").detach()
    assert float(moved.abs().max()) > 1e-3
    for _, other, features in ranks:
        assert other["top1"] == results["top1"]
        torch.testing.assert_close(features, rows, rtol=0, atol=1e-10)
    for split, count in (("TRAIN", NUM_TRAIN), ("TEST", NUM_TEST)):
        here, there = read_features(tmp_path, split), read_features(folder / "features", split)
        assert here.rows.shape == (count, 32) and here.images == there.images and here.class_names == there.class_names
        torch.testing.assert_close(here.rows, there.rows, rtol=0, atol=1e-10)
        assert torch.equal(here.labels, there.labels)
    assert torch.equal(read_features(tmp_path).rows, ranks[0][2]) and float(rows.std()) > 0.01
    assert len(json.loads((tmp_path / "features" / "TRAIN.json").read_text())["shards"]) > world_size  # in pieces


def _svm(level: int, world_size: int, folder: str) -> tuple[dict[str, float], Tensor]:
    """SVMs on two layers; mean average precision of each, and the features of TRAIN that were written."""
    layers = [["conv1", ["AdaptiveAvgPool2d", [[1, 1]]]], ["res5avg", ["Identity", []]]]
    config = _config("", EXTRACT_TRUNK_FEATURES_ONLY=True, LINEAR_EVAL_FEAT_POOL_OPS_MAP=layers)
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, 1]}]]
    config["SVM"]["costs"]["costs_list"], config["SVM"]["cross_val_folds"], config["SVM"]["dual"] = (
        [0.1, 10.0],
        2,
        False,
    )
    config["TEST_ONLY"] = True
    run, schedules, frozen = build_run(make_plan(config, folder, level, world_size), torch.device("cpu"))
    train(run, schedules, frozen, [ExtractFeatures(), TrainSvm()])
    return run.results["svm_map_by_layer"], read_features(folder).rows


@pytest.mark.slow
def test_svms_are_the_same_at_level_3_on_two_ranks(tmp_path):
    for name in ("alone", "sharded"):
        (tmp_path / name).mkdir()
    (wanted,) = run_on_ranks(1, _svm, 0, 1, str(tmp_path / "alone"))
    for figures, rows in run_on_ranks(2, _svm, 3, 2, str(tmp_path / "sharded")):
        assert figures == pytest.approx(wanted[0], abs=1e-10) and figures["conv1"] > 0.3
        torch.testing.assert_close(rows, wanted[1], rtol=0, atol=1e-10)


def _centroids() -> tuple[Tensor, Tensor]:
    rows = torch.randn(23, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    centroids = kmeans(rows, 4, 20, seed=1)
    return centroids, nearest_centroids(rows, centroids)[0]


def test_clusters_are_the_same_on_three_ranks():
    ((wanted, labels),) = run_on_ranks(1, _centroids)
    for centroids, found in run_on_ranks(3, _centroids):
        torch.testing.assert_close(centroids, wanted, rtol=0, atol=1e-12)
        assert torch.equal(found, labels) and len(labels.unique()) == 4


def _found(level: int, world_size: int, root: str, folder: str, num_queries: int = -1) -> dict[str, float]:
    names = {"EVAL_DATASET_NAME": "roxford5k", "TRAIN_DATASET_NAME": "rparis6k", "FEATS_PROCESSING_TYPE": "rmac"}
    config = retrieval_config(Path(root), **names, NUM_QUERY_SAMPLES=num_queries)
    plan = make_plan(config, folder, level=level, world_size=world_size)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [InstanceRetrieval()])
    return run.results["instance_retrieval"]["mAP"]


def test_images_are_found_alike_at_level_3_on_three_ranks(tmp_path):
    for name in ("roxford5k", "rparis6k"):
        make_revisited(tmp_path, name)
    # VISSL's own figures, as in tests/unit/evaluation/test_retrieval.py
    wanted = {"e": 0.39268353174603177, "m": 0.4910683066933067, "h": 0.36880411255411255}
    for found in run_on_ranks(3, _found, 3, 3, str(tmp_path), str(tmp_path / "run")):  # 28 images: two ranks get copies
        assert found == pytest.approx(wanted, abs=1e-12)


def test_a_rank_without_a_query_finds_what_the_others_find(tmp_path):
    for name in ("roxford5k", "rparis6k"):
        make_revisited(tmp_path, name)
    one, two = run_on_ranks(2, _found, 0, 2, str(tmp_path), str(tmp_path / "run"), 1)
    assert one == two == pytest.approx(_found(0, 1, str(tmp_path), str(tmp_path / "alone"), 1), abs=1e-12)


def test_features_that_are_not_whole_are_refused(alone, tmp_path):
    folder = tmp_path / "features"
    shutil.copytree(alone[3] / "features", folder)
    index = json.loads((folder / "TEST.json").read_text())
    first = next(iter(index["shards"]))
    del index["shards"][first]
    (folder / "TEST.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="lacks images of TEST"):
        read_features(tmp_path, "TEST")
    (folder / first).unlink()
    (folder / "TEST.json").unlink()
    with pytest.raises(DataError, match="no readable features of TEST"):
        read_features(tmp_path, "TEST")


def _load(config: dict[str, Any]) -> dict[str, Tensor]:
    model = build_model(model_block(config["MODEL"]))
    initialize_(model, seed=3)
    load_first_weights(model, make_plan(config))
    return model.state_dict()


def test_weights_of_an_older_checkpoint_are_said_to_be_that(pretrained, tmp_path, capsys):
    shutil.copytree(pretrained[0], tmp_path / "run")
    (older,) = (tmp_path / "run/checkpoints").iterdir()
    newer = older.with_name("step_000000099")
    shutil.copytree(older, newer)
    (newer / "rank00000.safetensors").unlink()
    _load(_config(str(tmp_path / "run")))
    text = capsys.readouterr().out
    assert "passed over: " in text and "step_000000099" in text


def test_what_is_taken_and_what_must_fit(pretrained, capsys):
    folder, trained = pretrained
    swav = [["swav_head", {"dims": [32, 8], "num_clusters": [5]}]]
    whole = _config(str(folder), EVAL_MODE_ON=False, FREEZE_TRUNK_ONLY=False)
    whole["MODEL"]["HEAD"]["PARAMS"] = swav
    state = _load(whole)
    counters = {name for name in trained if name.endswith("num_batches_tracked")}
    assert all(torch.equal(state[name], trained[name]) for name in trained.keys() - counters)
    assert "Beginning with" in capsys.readouterr().out
    trunk_only = _config(str(folder))
    trunk_only["MODEL"]["HEAD"]["PARAMS"] = swav
    assert not torch.equal(_load(trunk_only)["heads.0.prototypes0.weight"], trained["heads.0.prototypes0.weight"])
    whole["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "num_clusters": [7]}]]
    whole["MODEL"]["FEATURE_EVAL_SETTINGS"]["ASSERT_HEAD_LAYER_SHAPE_INIT"] = True
    with pytest.raises(CheckpointError, match=r"heads.0.prototypes0.weight \[5, 8\] in the file, \[7, 8\] here"):
        _load(whole)
    whole["MODEL"]["FEATURE_EVAL_SETTINGS"]["ASSERT_HEAD_LAYER_SHAPE_INIT"] = False
    assert torch.equal(_load(whole)["trunk.stem.0.weight"], trained["trunk.stem.0.weight"])
    trunk_only["MODEL"]["TRUNK"]["REGNET"]["stem_width"] = 16
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the model \(\d+ of its \d+ tensors fit, \d+ of the model.s lack theirs\): "
        r"trunk.stages.0.0.0.f.a.0.weight",
    ):
        _load(trunk_only)
