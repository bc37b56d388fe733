"""What a model with adapters begins with: the weights under them, those of a run, and those of a folder of peft's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor

from tests.unit.models.test_lora import VIT, drawn, settings, timm
from vissl_zero.checkpoint import first_weights
from vissl_zero.checkpoint.adapter_folder import write_adapters
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.config.blocks.model_and_loss import ModelConfig
from vissl_zero.config.compose import load
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import Model


def _begun(config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path) -> Model:
    """A model that begins with a file of these tensors."""
    torch.save(dict(tensors), folder / "weights.pth")
    data = asdict(load("supervised/digits").DATA)
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump({"config": {"MODEL": {"TRUNK": {}}, "DATA": data}}))
    config.WEIGHTS_INIT.PARAMS_FILE = str(folder / "weights.pth")
    model = drawn(config, seed=9)
    run = load("supervised/digits")
    run.MODEL = config
    load_first_weights(model, SimpleNamespace(config=run))
    return model


def _librarys(name: str) -> str:
    return name.removeprefix("trunk.").removeprefix("embedding.unit.").replace(".unit.", ".")


@pytest.mark.parametrize("renamed", [str, _librarys])
def test_weights_without_adapters_go_under_them(renamed: Callable[[str], str], tmp_path: Path) -> None:
    tensors = drawn(settings(timm(VIT), USE_LORA=False)).state_dict()
    model = _begun(settings(timm(VIT)), {renamed(name): tensor for name, tensor in tensors.items()}, tmp_path)
    found = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not found["trunk.blocks.0.unit.attn.qkv.lora_B.default.weight"].any()


def test_weights_with_adapters_go_on_and_are_never_dropped(tmp_path: Path) -> None:
    tensors = {name: torch.randn_like(tensor) for name, tensor in drawn(settings()).state_dict().items()}
    found = _begun(settings(), tensors, tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError, match="holds LoRA adapters"):
        _begun(settings(USE_LORA=False), tensors, tmp_path)
    with pytest.raises(CheckpointError, match=r"lora_A\.default\.weight"):
        _begun(settings(R=3), tensors, tmp_path)
    with pytest.raises(CheckpointError, match="weights of WEIGHTS_INIT have adapters"):
        _begun(settings(ADAPTER_FOLDER="adapter"), tensors, tmp_path)
    with (
        patch.object(first_weights, "saved_config", lambda _: None),
        pytest.raises(CheckpointError, match="beside it says their LORA_ALPHA"),
    ):
        _begun(settings(), tensors, tmp_path)


def test_adapters_that_nothing_trains_are_refused(tmp_path: Path) -> None:
    frozen = settings()
    frozen.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON = frozen.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY = True
    tensors = drawn(settings(USE_LORA=False)).state_dict()
    with pytest.raises(CheckpointError, match="as this run trains no adapters"):
        _begun(frozen, tensors, tmp_path)
    _begun(frozen, drawn(settings()).state_dict(), tmp_path)
    # As in a measurement of a trunk that would be trained otherwise.
    measured = settings()
    measured.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON = measured.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_AND_HEAD = True
    with pytest.raises(CheckpointError, match="as this run trains no adapters"):
        _begun(measured, tensors, tmp_path)


def test_the_adapters_of_a_folder_go_over_weights_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = drawn(settings(), seed=5)
    for name, param in trained.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(param)
    write_adapters(trained.trunk, tmp_path)
    plain = drawn(settings(USE_LORA=False)).state_dict()
    model = _begun(settings(ADAPTER_FOLDER=str(tmp_path)), plain, tmp_path)
    found, wanted = model.state_dict(), trained.state_dict()
    adapters = [name for name in found if ".lora_" in name]
    assert len(adapters) == 8 and all(torch.equal(found[name], wanted[name]) for name in adapters)
    assert f"Beginning with 8 tensors of the adapter in {tmp_path}." in capsys.readouterr().out
    # A run that trains none may have them from the folder.
    frozen = settings(ADAPTER_FOLDER=str(tmp_path))
    frozen.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON = frozen.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY = True
    assert torch.equal(_begun(frozen, plain, tmp_path).state_dict()[adapters[0]], wanted[adapters[0]])
