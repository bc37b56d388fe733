"""Trunks for detection: the names that detectron2 publishes, and torchvision's Faster R-CNN."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import yaml

import vissl_zero
from tests.unit.weights.test_export import exported, randomized
from vissl_zero.cli import main
from vissl_zero.weights.to_detectron2 import resnet_names, resnet_settings

SIDE = 64


def published_names(blocks: tuple[int, ...], num_convolutions: int) -> set[str]:
    """Names in detectron2's R-50.pkl, R-101.pkl and so on: ``detectron2/modeling/backbone/resnet.py``."""
    norm = ("weight", "bias", "running_mean", "running_var")

    def layer(name: str) -> list[str]:
        return [f"{name}.weight", *(f"{name}.norm.{part}" for part in norm)]

    names = layer("stem.conv1")
    for stage, count in enumerate(blocks, 2):
        for block, number in itertools.product(range(count), range(1, num_convolutions + 1)):
            names += layer(f"res{stage}.{block}.conv{number}")
        # The first block of a stage changes the number of channels; of basic blocks, the first stage does not.
        names += layer(f"res{stage}.0.shortcut") if num_convolutions == 3 or stage > 2 else []
    return set(names)


def export(tmp_path: Path, net: torch.nn.Module) -> tuple[Any, Path]:
    torch.save(randomized(net).state_dict(), tmp_path / "in.pth")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "in.pth"), "--to", "detectron2", "--out", str(out)]) == 0
    with (out / "model.pkl").open("rb") as file:
        return pickle.load(file), out


def test_a_resnet_has_the_names_and_settings_of_detectron2(tmp_path, capsys):
    content, out = export(tmp_path, net := torchvision.models.resnet18())
    assert content["__author__"] == "vissl_zero" and content["matching_heuristics"] is True
    assert set(content["model"]) == published_names((2, 2, 2, 2), 2)
    assert (content["model"]["res5.0.shortcut.norm.bias"] == net.layer4[0].downsample[1].bias.detach().numpy()).all()
    config = yaml.safe_load((out / "detectron2.yaml").read_text())
    expected = {"DEPTH": 18, "STRIDE_IN_1X1": False, "RES2_OUT_CHANNELS": 64}
    assert config["MODEL"]["RESNETS"] == expected and config["MODEL"]["WEIGHTS"] == str(out / "model.pkl")
    assert config["MODEL"]["PIXEL_MEAN"] == pytest.approx([123.675, 116.28, 103.53])
    assert config["INPUT"]["FORMAT"] == "RGB"
    assert f'cfg.merge_from_file("{out}/detectron2.yaml")' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "blocks", "expected"),
    [
        ("resnet50", (3, 4, 6, 3), {"DEPTH": 50}),
        ("resnet101", (3, 4, 23, 3), {"DEPTH": 101}),
        ("resnext50_32x4d", (3, 4, 6, 3), {"DEPTH": 50, "NUM_GROUPS": 32, "WIDTH_PER_GROUP": 4}),
        ("wide_resnet50_2", (3, 4, 6, 3), {"DEPTH": 50, "NUM_GROUPS": 1, "WIDTH_PER_GROUP": 128}),
    ],
)
def test_bottlenecks_have_the_names_of_r_50_pkl(name, blocks, expected):
    with torch.device("meta"):
        net = torchvision.models.get_model(name)
    net.fc = torch.nn.Identity()
    shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    assert set(resnet_names(list(shapes)).values()) == published_names(blocks, 3)
    assert resnet_settings(shapes) == {"STRIDE_IN_1X1": False, **expected}


def test_a_transformer_has_the_names_of_vitdet_and_layer_scales_in_its_layers(tmp_path, capsys):
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, init_values=1.0)
    content, _ = export(tmp_path, net)
    layers = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    names = {f"blocks.{block}.{layer}.{part}" for block in (0, 1) for layer in layers for part in ("weight", "bias")}
    names |= {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert set(content["model"]) == {f"backbone.net.{name}" for name in names}
    block = net.blocks[1]
    scaled = block.ls2.gamma[:, None] * block.mlp.fc2.weight
    torch.testing.assert_close(torch.from_numpy(content["model"]["backbone.net.blocks.1.mlp.fc2.weight"]), scaled)
    assert "embed_dim=192, depth=2, num_heads=3, mlp_ratio=4.0, pretrain_img_size=32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("convnext_atto", "has no place for"),
        ("resnet26", "depth 18, 34, 50, 101 and 152"),
        ("resnet18d", "no place for conv1."),
    ],
)
def test_what_detectron2_does_not_build_is_refused(tmp_path, capsys, name, wanted):
    torch.save(timm.create_model(name).state_dict(), tmp_path / "in.pth")
    assert main(["export", str(tmp_path / "in.pth"), "--to", "detectron2", "--out", str(tmp_path / "out")]) == 2
    assert wanted in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_torchvisions_faster_r_cnn_takes_an_exported_resnet(tmp_path):
    file, out = exported(tmp_path, "resnet", "torchvision")
    model = json.loads((out / "config.json").read_text())["model"]
    backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(backbone_name=model, weights=None)
    backbone.body.load_state_dict(torch.load(out / f"{model}.pth"))
    detector = torchvision.models.detection.FasterRCNN(backbone, num_classes=3).eval()
    images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        maps = detector.backbone.body(images)["3"]
        torch.testing.assert_close(maps.mean(dim=(2, 3)), vissl_zero.load_trunk(file)(images), rtol=1e-4, atol=1e-4)
