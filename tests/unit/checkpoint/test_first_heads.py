"""Heads of WEIGHTS_INIT: another width starts anew with a note, and figures of untrained heads are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.blocks import model_block
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.errors import CheckpointError
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import Model, build_model


def model_of(classes: int, path: Path, **settings: bool) -> tuple[dict, Model]:
    config = make_config()
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, classes]}]]
    config["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] = str(path)
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= settings
    model = build_model(model_block(config["MODEL"]))
    initialize_(model, seed=3)
    return config, model


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Weights with a classifier of 5 classes."""
    _, model = model_of(5, tmp_path / "trained.pth")
    initialize_(model, seed=9)
    torch.save(model.state_dict(), tmp_path / "trained.pth")
    return tmp_path / "trained.pth", model.state_dict()


def test_a_classifier_of_other_classes_starts_anew_with_a_note(trained, capsys):
    path, state = trained
    config, model = model_of(3, path)
    before = {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}
    load_first_weights(model, make_plan(config))
    assert "heads.0.clf.0 starts anew" in capsys.readouterr().out
    assert torch.equal(model.trunk.stem[0].weight, state["trunk.stem.0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.heads.state_dict().items())
    config["MODEL"]["FEATURE_EVAL_SETTINGS"]["ASSERT_HEAD_LAYER_SHAPE_INIT"] = True
    with pytest.raises(CheckpointError, match=r"heads.0.clf.0.weight \[5, \d+\] in the file, \[3, \d+\] here"):
        load_first_weights(model, make_plan(config))


def test_heads_that_the_weights_lack_are_not_measured(trained, tmp_path):
    _, state = trained
    torch.save({name: t for name, t in state.items() if not name.startswith("heads.")}, tmp_path / "trunk.pth")
    settings = {"EVAL_MODE_ON": True, "FREEZE_TRUNK_AND_HEAD": True, "EVAL_TRUNK_AND_HEAD": True}
    config, model = model_of(5, tmp_path / "trunk.pth", **settings)
    with pytest.raises(
        CheckpointError, match=r"no trained weights of heads that this run measures.*heads.0.clf.0.bias"
    ):
        load_first_weights(model, make_plan(config))
    config, model = model_of(5, trained[0], **settings)
    load_first_weights(model, make_plan(config))
    assert torch.equal(model.heads[0].clf[0].weight, state["heads.0.clf.0.weight"])
