"""A recipe becomes a run of a program: what is changed in it, and what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.example_config import config
from vissl_zero.config.programs import ASSIGNMENTS, NEIGHBORS, PREDICTIONS, PROGRAMS, RETRIEVAL, begin_program

SETTINGS = "MODEL__FEATURE_EVAL_SETTINGS__"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_and_saves_nothing_and_measures_what_it_is_for(name: str) -> None:
    run = config(CHECKPOINT__CHECKPOINT_FREQUENCY=1, CHECKPOINT__CHECKPOINT_ITER_FREQUENCY=1)
    run.NEAREST_NEIGHBOR.USE_KNN = name != NEIGHBORS
    begin_program(run, name)
    assert (name, True) == (run.PROGRAM, run.TEST_ONLY)
    assert (run.CHECKPOINT.CHECKPOINT_FREQUENCY, run.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY) == (-1, -1)
    assert run.NEAREST_NEIGHBOR.USE_KNN is (name == NEIGHBORS)
    settings, of_heads = run.MODEL.FEATURE_EVAL_SETTINGS, name in (PREDICTIONS, ASSIGNMENTS)
    assert settings.EVAL_MODE_ON is settings.EXTRACT_TRUNK_FEATURES_ONLY is not of_heads
    assert run.LOSS["name"] == ("CrossEntropyLoss" if of_heads else "swav_loss")
    assert "swav_loss" in run.LOSS


@pytest.mark.parametrize("name", [PREDICTIONS, "extract_features"])
def test_a_trunk_that_is_frozen_with_its_head_may_have_heads_on_inner_layers(name: str) -> None:
    run = config(**{f"{SETTINGS}EVAL_MODE_ON": True, f"{SETTINGS}FREEZE_TRUNK_AND_HEAD": True})
    begin_program(run, name)
    settings = run.MODEL.FEATURE_EVAL_SETTINGS
    is_moved = name == PREDICTIONS
    assert (is_moved, not is_moved) == (settings.FREEZE_TRUNK_ONLY, settings.FREEZE_TRUNK_AND_HEAD)
    assert not settings.EXTRACT_TRUNK_FEATURES_ONLY
    free = config()
    begin_program(free, PREDICTIONS)
    assert not free.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY


@pytest.mark.parametrize(("resize", "side"), [(-1, 32), (32, 32), (33, 33), (224, 224)])
def test_retrieval_has_a_source_and_the_first_layer(
    resize: int, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    taps = [["res4", ["Identity", []]], ["res5", ["Identity", []]]]
    run = config(**{f"{SETTINGS}LINEAR_EVAL_FEAT_POOL_OPS_MAP": taps}, IMG_RETRIEVAL__RESIZE_IMG=resize)
    run.IMG_RETRIEVAL.DATASET_PATH, run.IMG_RETRIEVAL.EVAL_DATASET_NAME = "~/sets", "roxford5k"
    begin_program(run, RETRIEVAL)
    assert taps[:1] == run.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP
    assert (run.DATA.TRAIN.DATA_SOURCES, run.DATA.TEST.DATA_SOURCES) == (["disk_folder"], [])
    assert [str(tmp_path / "sets/roxford5k")] == run.DATA.TRAIN.DATA_PATHS
    assert [transform["name"] for transform in run.DATA.TRAIN.TRANSFORMS] == ["Resize", "CenterCrop", "ToTensor"]
    assert [transform.get("size") for transform in run.DATA.TRAIN.TRANSFORMS] == [side, side, None]
