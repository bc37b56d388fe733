"""A run with MODEL.LORA goes out as an adapter of peft, or merged, and never without what it has learned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

import vissl_zero
from tests.unit.config.example_config import complaints
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.cli import main
from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import Lora, ModelConfig
from vissl_zero.config.compose import load
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.evaluation import trunk as trunk_file
from vissl_zero.models.model import Model, build_model
from vissl_zero.reporting.weight_files import FinalWeights
from vissl_zero.resolve.components import with_run_of_weights
from vissl_zero.resolve.resolve import save_resolved

VIT = {"img_size": 32, "patch_size": 8, "depth": 2}
LORA = {"USE_LORA": True, "R": 3, "LORA_ALPHA": 12}


def _trained(folder: Path, trunk: dict[str, object], lora: dict[str, object]) -> Path:
    """The folder of a run of two steps, whose adapters are then made large."""
    config = make_config(USE_KNN=False)
    config["DATA"]["TRAIN"]["TRANSFORMS"].insert(0, {"name": "Resize", "size": [32, 32]})
    config["MODEL"] |= {"TRUNK": trunk, "LORA": LORA | lora}
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, 10]}]]
    plan = make_plan(config, folder, max_steps=2)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    for name, param in run.sharded.model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(param, std=0.1)
    train(run, schedules, frozen, [FinalWeights()])
    save_resolved(plan, folder / "config.resolved.yaml")
    return folder


@pytest.fixture(scope="module")
def of_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trunk = {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"name": "vit_tiny_patch16_224", "model_args": VIT}}
    return _trained(tmp_path_factory.mktemp("run"), trunk, {"TARGET_MODULES": ["attn.qkv", "fc1"]})


def _exported(run: Path, target: str, out: Path) -> Path:
    assert main(["export", str(run), "--to", target, "--out", str(out)]) == 0
    return out


def _base(run: Path, net: nn.Module) -> nn.Module:
    """The library's own model with the run's frozen weights."""
    tensors = load_file(run / "weights.safetensors")
    own = {name.replace(".base_layer", "").replace(".unit", ""): tensor for name, tensor in tensors.items()}
    plain = {name.removeprefix("trunk.").removeprefix("net.").removeprefix("embedding."): t for name, t in own.items()}
    wanted = net.state_dict()
    net.load_state_dict({name: plain[name] for name in wanted})
    return net.eval()


def test_peft_opens_the_adapter_over_the_library_s_model(of_vit: Path, tmp_path: Path, capsys) -> None:
    out = _exported(of_vit, "peft", tmp_path / "adapter")
    assert f'peft.PeftModel.from_pretrained(base, "{out}")' in capsys.readouterr().out
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 12, "LORA")
    assert len(load_file(out / "adapter_model.safetensors")) == 2 * 2 * 2
    base = _base(of_vit, timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        ours, without = vissl_zero.load_trunk(of_vit)(images), base(images)
        theirs = peft.PeftModel.from_pretrained(base, out).eval()(images)
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
    assert (without - ours).abs().max() > 1e-2


def test_a_trunk_of_torchvision(tmp_path: Path) -> None:
    trunk = {"NAME": "torchvision/convnext_tiny", "PARAMS": {"name": "convnext_tiny"}}
    run = _trained(tmp_path, trunk, {"TARGET_MODULES": r"features[.]7[.].*block[.]3"})
    out = _exported(run, "peft", tmp_path / "adapter")
    net = torchvision.models.convnext_tiny()
    net.classifier[2] = nn.Identity()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(_base(run, net), out).eval()(images)
        torch.testing.assert_close(theirs, vissl_zero.load_trunk(run)(images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", ["timm", "safetensors"])
def test_other_forms_hold_the_merged_weights(of_vit: Path, tmp_path: Path, target: str) -> None:
    out = vissl_zero.load_trunk(_exported(of_vit, target, tmp_path / "out"))
    assert not any(".lora_" in name for name in out.state_dict())
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(out(images), vissl_zero.load_trunk(of_vit)(images), rtol=1e-4, atol=1e-5)


def test_what_would_drop_the_adapter_is_refused(of_vit: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    words = ["checkpoint", "export", str(of_vit), "--to", str(tmp_path / "x.safetensors")]
    assert main([*words, "--names", "timm"]) == 2
    assert "for which timm has no names" in capsys.readouterr().err
    torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT).state_dict(), tmp_path / "plain.pth")
    assert main(["export", str(tmp_path / "plain.pth"), "--to", "peft", "--out", str(tmp_path / "no")]) == 2
    assert "this trunk has no adapters" in capsys.readouterr().err
    monkeypatch.setattr(trunk_file, "find_spec", lambda _: None)
    assert main(["export", str(of_vit), "--to", "timm", "--out", str(tmp_path / "no")]) == 2
    assert "pip install 'vissl-zero[lora]'" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_recipe_that_takes_the_run_s_trunk_takes_its_adapters(of_vit: Path) -> None:
    cfg = load("benchmark/linear")
    cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(of_vit)
    assert Lora(**LORA, TARGET_MODULES=["attn.qkv", "fc1"]) == with_run_of_weights(cfg).MODEL.LORA
    own = cfg.MODEL.LORA = Lora(**LORA, TARGET_MODULES=["attn.qkv", "fc1"], LORA_DROPOUT=0.5)
    assert own == with_run_of_weights(cfg).MODEL.LORA
    own.LORA_ALPHA = 6
    with pytest.raises(ConfigError, match=r"must be as in the run .* \{R: 3, LORA_ALPHA: 12, TARGET_MODULES: \['attn"):
        with_run_of_weights(cfg)
    cfg.MODEL.TRUNK.NAME = "vision_transformer"  # named, and not taken from the run
    with pytest.raises(ConfigError, match="must be as in the run"):
        with_run_of_weights(cfg)
    full = load("finetune/classification")
    full.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(of_vit)
    with pytest.raises(ConfigError, match="its trunk would stay frozen"):
        with_run_of_weights(full)


def _saved_by_peft(folder: Path, **options: Any) -> nn.Module:
    """A model of timm's with an adapter of numbers of its own, both saved."""
    net = timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT)
    torch.save(net.state_dict(), folder / "base.pth")
    config = {"r": 3, "lora_alpha": 12, "target_modules": ["attn.qkv", "mlp.fc1"]} | options
    model = peft.get_peft_model(net, peft.LoraConfig(**config))
    for name, param in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder / "saved")
    (folder / "adapter").mkdir()
    for file in (folder / "saved").iterdir():  # as in Hugging Face's cache
        (folder / "adapter" / file.name).symlink_to(file)
    return model.eval()


def _begun(folder: Path, **lora: Any) -> Model:
    run = load("supervised/digits")
    trunk = {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"name": "vit_tiny_patch16_224", "model_args": VIT}}
    block = LORA | {"TARGET_MODULES": ["attn.qkv", "fc1"], "ADAPTER_FOLDER": str(folder / "adapter")} | lora
    run.MODEL = block_of(ModelConfig, {"TRUNK": trunk, "HEAD": {"PARAMS": []}, "LORA": block})
    run.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(folder / "base.pth")
    model = build_model(run.MODEL)
    load_first_weights(model, SimpleNamespace(config=run))
    return model.eval()


def test_a_run_begins_with_an_adapter_of_peft(tmp_path: Path) -> None:
    theirs, ours = _saved_by_peft(tmp_path), _begun(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours([images], features_only=True)[0], theirs(images), rtol=1e-6, atol=1e-6)
    for lora, said in (
        ({"R": 2}, "has r=3, and must have 2. Write config.MODEL.LORA.R=3."),
        ({"LORA_ALPHA": 8}, "has lora_alpha=12, and must have 8"),
        ({"TARGET_MODULES": ["attn.qkv"]}, "the model lacks base_model.model.blocks.0.mlp.fc1.lora_A.weight (4 such)"),
        ({"TARGET_MODULES": ["attn.qkv", "fc1", "fc2"]}, "the file lacks base_model.model.blocks.0.mlp.fc2.lora_A"),
    ):
        with pytest.raises(CheckpointError) as caught:
            _begun(tmp_path, **lora)
        assert said in str(caught.value)


OTHER = [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"fc1": 2}}, {"init_lora_weights": "pissa"}]


@pytest.mark.parametrize("options", OTHER)
def test_adapters_that_compute_something_else_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    _saved_by_peft(tmp_path, **options)
    with pytest.raises(CheckpointError, match=f"has {next(iter(options))}=.* Save one with plain LoRA"):
        _begun(tmp_path)


def test_rules_of_the_folder(tmp_path: Path) -> None:
    missing = complaints(MODEL__LORA=Lora(True, ADAPTER_FOLDER=str(tmp_path)))
    assert "needs weights" in missing[0] and "must be a folder with" in missing[1]
