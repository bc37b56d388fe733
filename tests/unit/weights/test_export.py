"""Trunks go out as folders that other libraries open, and come in again with the same bits."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import vissl_zero
from vissl_zero.cli import main
from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import ModelConfig
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_model
from vissl_zero.models.trunks.timm_trunk import build_timm_trunk
from vissl_zero.weights import to_library
from vissl_zero.weights.to_library import Source, Views, write

TINY = {"img_size": 32, "patch_size": 8, "depth": 2}


def randomized(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return net.eval()


MODELS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **TINY),
    "dinov2": lambda: timm.create_model("vit_tiny_patch16_224", **TINY, init_values=1.0),
    "registers": lambda: timm.create_model(
        "vit_tiny_patch16_224", **TINY, init_values=1.0, reg_tokens=2, no_embed_class=True
    ),
    "dinov3": lambda: timm.create_model("vit_tiny_patch16_dinov3_qkvb", depth=2, global_pool="token"),
    "convnext": lambda: timm.create_model("convnext_atto", depths=[1, 1, 1, 1]),
    "clip": lambda: timm.create_model("vit_base_patch32_clip_224", **TINY, embed_dim=64, num_heads=1),
    "timm's swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=12, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2]
    ),
    "resnet": lambda: torchvision.models.resnet18(),
    "swin": lambda: torchvision.models.swin_t(),
}
CELLS = [
    *((name, target) for name in ("vit", "dinov2", "registers") for target in ("timm", "transformers")),
    ("dinov3", "timm"),
    ("convnext", "timm"),
    ("resnet", "timm"),
    ("resnet", "torchvision"),
    pytest.param("swin", "torchvision", marks=pytest.mark.slow),
    ("dinov2", "torchhub"),
    ("convnext", "safetensors"),
    ("registers", "safetensors"),
]


def exported(tmp_path: Path, name: str, target: str) -> tuple[Path, Path]:
    """The file that went in, and the folder that came out."""
    torch.save(randomized(MODELS[name]()).state_dict(), tmp_path / "in.pth")
    out = tmp_path / "deep" / "out"
    assert main(["export", str(tmp_path / "in.pth"), "--to", target, "--out", str(out), "--license", "mit"]) == 0
    return tmp_path / "in.pth", out


@pytest.mark.parametrize(("name", "target"), CELLS)
def test_a_folder_is_opened_by_its_library_and_comes_in_again_with_the_same_bits(tmp_path, name, target, capsys):
    file, out = exported(tmp_path, name, target)
    text = capsys.readouterr().out
    # Typed where it was printed, the line finds the folder; the card is read in the folder's own.
    assert f"for {target}" in text and ("opens with" in text and str(out) in text.split("opens with")[1])
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and "```python" in card
    assert json.loads((out / "preprocessor_config.json").read_text())["image_mean"] == [0.485, 0.456, 0.406]
    before = vissl_zero.load_trunk(file)
    again = vissl_zero.load_trunk(next(out.glob("*.pth")) if target == "torchvision" else out)
    state, other = before.trunk.state_dict(), again.trunk.state_dict()
    # DINOv2 with registers adds a position of 0 to its class token: equal numbers, but for the sign of a zero.
    assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    side = 32 if name in ("vit", "dinov2", "registers") else 64
    with torch.no_grad():
        images = torch.randn(2, 3, side, side)
        torch.testing.assert_close(again(images), before(images), rtol=0, atol=0)


def test_the_librarys_own_calls_open_the_folders(tmp_path, capsys):
    for target in ("timm", "transformers"):
        (tmp_path / target).mkdir()
        file, out = exported(tmp_path / target, "dinov2", target)
        ours = vissl_zero.load_trunk(file)
        images = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            if target == "timm":
                found = timm.create_model(f"local-dir:{out}", pretrained=True).eval()(images)
            else:
                found = transformers.AutoModel.from_pretrained(out).eval()(images).last_hidden_state[:, 0]
            torch.testing.assert_close(found, ours(images), rtol=1e-5, atol=1e-5)
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    assert processor.crop_size["height"] == 32
    capsys.readouterr()


@pytest.mark.parametrize(("name", "sides"), [("clip", (32, 48)), ("timm's swin", (224, 96))])
def test_timm_gives_the_trunks_features_at_two_sizes(tmp_path, name, sides):
    """CLIP's epsilon is not that of other transformers, and Swin takes other sizes if it is told so."""
    file, out = exported(tmp_path, name, "timm")
    ours, theirs = vissl_zero.load_trunk(file), timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    for side in sides:
        images = torch.randn(2, 3, side, side)
        with torch.no_grad():
            torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-6)


def test_a_timm_trunk_needs_no_number_of_heads_for_transformers(tmp_path):
    trunk = vissl_zero.load_trunk(exported(tmp_path, "vit", "timm")[0]).trunk
    config = {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"model_args": TINY}}
    (tmp_path / "hf").mkdir()
    views = Views(32, 32, [0.5] * 3, [0.5] * 3)
    assert write(Source(trunk, config, views), "transformers", tmp_path / "hf").difference < 1e-5
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_attention_heads"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_onnxruntime_gives_the_trunks_features(tmp_path, name, capsys):
    import onnxruntime

    file, out = exported(tmp_path, name, "onnx")
    session, ours = onnxruntime.InferenceSession(out / "model.onnx"), vissl_zero.load_trunk(file)
    side = 32 if name == "vit" else 224
    for batch in (1, 5):
        images = torch.randn(batch, 3, side, side)
        with torch.no_grad():
            (found,) = session.run(None, {"images": images.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), ours(images), rtol=1e-4, atol=1e-4)
    assert "Batches of any size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--to", "transformers", "--out", "out"], "takes plain vision transformers, and this is a timm/resnet18"),
        (["--to", "keras", "--out", "out"], "invalid choice: 'keras'"),
        (["--to", "timm", "--out", "."], "is not empty, and nothing is overwritten"),
    ],
)
def test_what_has_no_form_there_is_refused(tmp_path, monkeypatch, capsys, words, wanted):
    monkeypatch.chdir(tmp_path)
    torch.save(torchvision.models.resnet18().state_dict(), "in.pth")
    assert main(["export", "in.pth", *words]) == 2
    assert wanted in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("target", ["timm", "safetensors"])
def test_a_full_disk_is_one_sentence(target, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(to_library, "write_shard_file", full)
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "in.pth")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "in.pth"), "--to", target, "--out", str(out)]) == 2
    sentence = f"--out {out}: cannot be written (No space left on device). Name another place, or make room.\n"
    assert capsys.readouterr().err.endswith(sentence) and [*tmp_path.iterdir()] == [tmp_path / "in.pth"]


@pytest.mark.parametrize("target", ["timm", "transformers", "torchhub"])
@pytest.mark.parametrize("how", ["offset", "bicubic"])
def test_positions_that_the_library_would_resize_otherwise_go_out_at_the_size_of_the_run(how, target, tmp_path):
    arguments = {"position_resize": how, "model_args": {**TINY, "init_values": 1.0}}
    trunk = randomized(build_timm_trunk("vit_tiny_patch16_224", **arguments))
    views = Views(24, 24, [0.5] * 3, [0.5] * 3)
    done = write(Source(trunk, {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": arguments}, views), target, tmp_path)
    assert done.difference < 1e-5
    assert any("24 pixels" in note for note in done.notes)


def _of_channels(channels: int) -> Source:
    """A transformer for images of so many channels, normalized by one number for all of them."""
    config = {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"model_args": TINY}}
    model = {"TRUNK": {**config, "PARAMS": {"name": "vit_tiny_patch16_224", **config["PARAMS"]}}}
    trunk = build_model(block_of(ModelConfig, {**model, "IN_CHANNELS": channels, "HEAD": {"PARAMS": []}})).trunk
    test = [{"name": "Resize", "size": 32}, {"name": "Normalize", "mean": [0.3], "std": [0.2]}]
    views = Views.of({"IN_CHANNELS": channels, "TEST": {"TRANSFORMS": test}, "TRAIN": {"TRANSFORMS": []}})
    return Source(randomized(trunk), config, views)


@pytest.mark.parametrize("target", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_trunk_that_sees_other_channels_goes_out_with_them(target: str, tmp_path: Path) -> None:
    source = _of_channels(5)
    done = write(source, target, tmp_path)
    assert done.difference < 1e-5
    if target == "safetensors":
        images = source.images(2, 32)
        with torch.no_grad():
            assert torch.equal(vissl_zero.load_trunk(tmp_path)(images), source.outputs(images))


@pytest.mark.parametrize("target", ["timm", "transformers", "torchvision", "torchhub", "detectron2"])
def test_a_library_of_color_images_is_refused_for_other_channels(target: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=f"--to {target}: takes networks for images of 3 channels, and this one is"
    ):
        write(_of_channels(5), target, tmp_path)


def test_one_number_for_all_channels_goes_out_for_each(tmp_path: Path) -> None:
    write(_of_channels(3), "safetensors", tmp_path)
    transforms = vissl_zero.load_trunk(tmp_path).config["DATA"]["TEST"]["TRANSFORMS"]
    assert transforms[-1] == {"name": "Normalize", "mean": [0.3] * 3, "std": [0.2] * 3}
