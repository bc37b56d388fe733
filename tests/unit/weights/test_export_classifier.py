"""A run that predicts classes goes out whole: the trunk, its last layer, and the names of the classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnxruntime
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

import vissl_zero
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.weights import TEACHER_WEIGHTS_FILE
from vissl_zero.cli import main
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.reporting.weight_files import FinalWeights
from vissl_zero.resolve.resolve import save_resolved

TRUNKS = {
    "timm's vit": ("timm", "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}),
    "timm's convnext": ("timm", "convnext_atto", {"depths": [1, 1, 1, 1]}),
    "torchvision's efficientnet": ("torchvision", "efficientnet_b0", {}),
}
HEAD = ["mlp", {"dims": [-1, 10]}]


def trained(folder: Path, name: str, head: list[object] = HEAD, seed: int = 3) -> Path:
    library, model, args = TRUNKS[name]
    folder.mkdir(exist_ok=True)
    config = make_config(USE_KNN=False)
    config["DATA"]["TRAIN"]["TRANSFORMS"].insert(0, {"name": "Resize", "size": [32, 32]})
    config["MODEL"]["TRUNK"] = {"NAME": f"{library}/{model}", "PARAMS": {"name": model, "model_args": args}}
    config["MODEL"]["HEAD"]["PARAMS"] = [head]
    plan = make_plan(config, folder, max_steps=1, seed=seed)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [FinalWeights()])
    save_resolved(plan, folder / "config.resolved.yaml")
    return folder


@pytest.fixture(scope="module", params=TRUNKS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, trained(tmp_path_factory.mktemp("run"), request.param)


def scores(folder: Path, images: Tensor) -> Tensor:
    """What the run itself would predict."""
    tensors = load_file(folder / "weights.safetensors")
    with torch.no_grad():
        features = vissl_zero.load_trunk(folder)(images)
    weight, bias = (tensors[f"heads.0.clf.0.{kind}"].float() for kind in ("weight", "bias"))
    return nn.functional.linear(features, weight, bias)


def exported(folder: Path, target: str, out: Path) -> Path:
    assert main(["export", str(folder), "--to", target, "--classifier", "--out", str(out)]) == 0
    return out


def test_its_own_library_predicts_what_the_run_does(run: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = run
    library, model, _ = TRUNKS[name]
    out, images = exported(folder, library, tmp_path / "out"), torch.randn(3, 3, 32, 32)
    config = json.loads((out / "config.json").read_text())
    if library == "timm":
        net = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
        assert net.num_classes == 10 and net.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    else:
        net = torchvision.models.get_model(model).eval()
        setattr(net.classifier, config["classifier"].rpartition(".")[2], nn.Linear(1280, 10))
        net.load_state_dict(torch.load(out / f"{model}.pth"))
        assert config["classes"] == [str(digit) for digit in range(10)]
    with torch.no_grad():
        torch.testing.assert_close(net(images), scores(folder, images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_gives_scores_and_names(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = trained(tmp_path / "run", "timm's vit")
    out, images = exported(folder, "onnx", tmp_path / "out"), torch.randn(3, 3, 32, 32)
    assert not [warning for warning in recwarn if "side effects" in str(warning.message)]  # torch's, of our modules
    config = json.loads((out / "config.json").read_text())
    assert config["output"] == "scores" and config["classes"] == [str(digit) for digit in range(10)]
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["scores"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), scores(folder, images), rtol=1e-3, atol=1e-4)


def test_the_teachers_classifier_goes_with_the_teachers_trunk(tmp_path: Path) -> None:
    folder, other = trained(tmp_path / "run", "timm's vit"), trained(tmp_path / "other", "timm's vit", seed=4)
    shutil.copy(other / "weights.safetensors", folder / TEACHER_WEIGHTS_FILE)
    out, images = tmp_path / "out", torch.randn(3, 3, 32, 32)
    command = ["export", str(folder), "--to", "timm", "--classifier", "--which", "teacher", "--out", str(out)]
    assert main(command) == 0
    net = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(net(images), scores(other, images), rtol=1e-4, atol=1e-5)


def test_what_is_no_classifier_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = trained(tmp_path / "deep", "timm's vit", ["mlp", {"dims": [-1, 16, 10]}])
    command = ["--classifier", "--out", str(tmp_path / "out")]
    assert main(["export", str(deep), "--to", "timm", *command]) == 2
    assert "has no head of one linear layer" in capsys.readouterr().err
    plain = trained(tmp_path / "plain", "timm's vit")
    assert main(["export", str(plain), "--to", "transformers", *command]) == 2
    assert "--classifier: goes with --to timm, torchvision, onnx" in capsys.readouterr().err
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "weights.pth")
    assert main(["export", str(tmp_path / "weights.pth"), "--to", "timm", *command]) == 2
    assert "is of no run here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_classifier_that_cannot_be_read_is_not_blamed_on_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("vissl_zero.evaluation.trunk.load_classifier", fail)
    command = ["export", str(trained(tmp_path / "run", "timm's vit")), "--to", "timm", "--classifier"]
    with pytest.raises(OSError, match="Input/output error"):
        main([*command, "--out", str(tmp_path / "out")])
    assert "--out" not in capsys.readouterr().err
