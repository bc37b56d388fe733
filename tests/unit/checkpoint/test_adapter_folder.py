"""Adapters of peft's files: what is written is read, and what computes something else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.models.test_lora import drawn, settings
from vissl_zero.checkpoint.adapter_folder import read_adapters, write_adapters
from vissl_zero.checkpoint.first_weights import _require_place_for_adapters
from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.config.blocks.model_and_loss import Lora
from vissl_zero.errors import CheckpointError
from vissl_zero.models.lora import merged, unadapted
from vissl_zero.models.model import Model

TARGETS = ["attn.qkv", "fc1"]


def _model() -> Model:
    model = drawn(settings(TARGET_MODULES=TARGETS, LORA_ALPHA=6))
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.constant_(param, 0.5)
    return model


def _options(folder: Path, **keys: Any) -> Lora:
    return Lora(**{"USE_LORA": True, "R": 2, "LORA_ALPHA": 6, "ADAPTER_FOLDER": str(folder), **keys})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = _model()
    write_adapters(model.trunk, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (2, 6, True)
    assert sorted(config["target_modules"]) == [
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1")
    ]
    assert "base_model.model.blocks.1.mlp.fc1.lora_B.weight" in load_file(tmp_path / "adapter_model.safetensors")
    readers, expected = read_adapters(model, _options(tmp_path)), dict(model.named_parameters())
    assert readers.keys() == {name for name in expected if ".lora_" in name} and len(readers) == 8
    assert all(read().equal(expected[name].detach()) for name, read in readers.items())


def test_a_merged_trunk_computes_the_same_and_one_without_adapters_what_the_frozen_layers_do() -> None:
    model = _model().eval()
    images = [torch.randn(2, 3, 8, 8)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        outputs = model.trunk(images)
        whole, alone = merged(model.trunk), unadapted(model.trunk)
        torch.testing.assert_close(whole(images), outputs)
        assert not any(".lora_" in name or ".base_layer" in name for name in (*whole.state_dict(), *alone.state_dict()))
        layer, path = model.trunk.get_submodule("blocks.0.unit.attn.qkv"), "blocks.0.unit.attn.qkv"
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        plain = layer.base_layer.weight
        torch.testing.assert_close(whole.get_submodule(path).weight, plain + 6 / 2 * product)
        assert alone.get_submodule(path).weight.equal(plain)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def _changed(folder: Path, **keys: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        ({"r": 3}, r"has r=3, and must have 2\. Write config\.MODEL\.LORA\.R=3\."),
        ({"lora_alpha": 8}, r"has lora_alpha=8, and must have 6\. Write config\.MODEL\.LORA\.LORA_ALPHA=8\."),
        ({"lora_alpha": None}, r"has lora_alpha=None, and must have 6"),
        ({"use_dora": True}, r"has use_dora=True, and must have False\. Save one with plain LoRA\."),
        ({"of_a_later_peft": 1}, r"has of_a_later_peft=1, and must have None"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa"),
        *(({"init_lora_weights": start}, "") for start in (True, False, None, "gaussian", "eva", "orthogonal")),
        ({"of_a_later_peft": 0}, ""),  # switched off
        ({"lora_dropout": 0.5, "task_type": "OTHER"}, ""),
    ],
)
def test_settings_that_compute_something_else_are_refused(keys: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    model = _model()
    write_adapters(model.trunk, tmp_path)
    _changed(tmp_path, **keys)
    if not refusal:
        assert read_adapters(model, _options(tmp_path))
        return
    with pytest.raises(CheckpointError, match=refusal):
        read_adapters(model, _options(tmp_path))


def test_other_layers_sizes_and_files_are_refused(tmp_path: Path) -> None:
    write_adapters(_model().trunk, tmp_path)
    with pytest.raises(CheckpointError, match=r"the file lacks base_model\.model\.blocks\.0\.attn\.proj.* \(4 such\)"):
        read_adapters(drawn(settings(TARGET_MODULES=[*TARGETS, "attn.proj"])), _options(tmp_path))
    with pytest.raises(CheckpointError, match=r"the model lacks base_model\.model\.blocks\.0\.mlp\.fc1.* \(4 such\)"):
        read_adapters(drawn(settings(TARGET_MODULES=TARGETS[:1])), _options(tmp_path))
    with pytest.raises(CheckpointError, match=r"is \[2, 8\] in the file, and \[3, 8\] here"):
        read_adapters(drawn(settings(TARGET_MODULES=TARGETS, R=3)), _options(tmp_path))
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        read_adapters(_model(), _options(tmp_path))


@pytest.mark.parametrize("file_has", [False, True])
@pytest.mark.parametrize("model_has", [False, True])
def test_weights_with_adapters_want_a_model_with_adapters(file_has: bool, model_has: bool) -> None:
    plain, adapters = "trunk.a.weight", "trunk.a.lora_A.default.weight"
    foreign = Foreign("", [Entry.of(name, torch.ones(1)) for name in [plain, *[adapters] * file_has]])
    shapes = dict.fromkeys([plain, *[adapters] * model_has], (1,))
    if file_has and not model_has:
        with pytest.raises(CheckpointError, match="holds LoRA adapters, and this model has none"):
            _require_place_for_adapters(foreign, shapes, "a.pt")
    else:
        _require_place_for_adapters(foreign, shapes, "a.pt")
