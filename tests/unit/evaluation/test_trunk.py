"""``load_trunk`` on run folders, whole and not."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

import vissl_zero
from tests.unit.commands.example_checkpoint import write_checkpoint
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.weights import final_step
from vissl_zero.data.loader import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError
from vissl_zero.evaluation.features import extract_features
from vissl_zero.reporting.weight_files import FinalWeights
from vissl_zero.resolve.resolve import save_resolved

FILE = "weights.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended: its folder, features of its TEST images, and the images."""
    folder = tmp_path_factory.mktemp("run")
    plan = make_plan(make_config(), folder, max_steps=3)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [FinalWeights()])
    save_resolved(plan, folder / "config.resolved.yaml")
    _, images = build_eval_images(plan.config.DATA, plan.seed)
    return folder, extract_features(run, images).rows, images


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the run folder to break."""
    for file in finished[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_features_are_those_of_the_run(finished):
    folder, rows, images = finished
    trunk = vissl_zero.load_trunk(folder)
    batch = torch.stack([trunk.transform(images.source.image(index)) for index in range(len(images))])
    with torch.no_grad():
        features = trunk(batch)
    assert features.dtype == torch.float32
    assert features.shape == (len(images), trunk.feature_dim)
    torch.testing.assert_close(features.double(), rows, rtol=1e-4, atol=1e-5)
    assert not any(module.training for module in trunk.modules())


def test_the_best_weights_are_a_model_of_the_run_too(folder):
    (folder / FILE).rename(folder / "weights_best.safetensors")
    trunk = vissl_zero.load_trunk(folder / "weights_best.safetensors")
    assert trunk(torch.rand(1, 3, 8, 8)).shape == (1, trunk.feature_dim)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no .*nowhere"):
        vissl_zero.load_trunk(tmp_path / "nowhere")


def test_a_folder_that_is_not_of_a_run(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither checkpoints nor weights"):
        vissl_zero.load_trunk(tmp_path)


def test_images_in_the_place_of_weights_are_named(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg")
    for path in (tmp_path, tmp_path / "a.jpg"):
        with pytest.raises(CheckpointError, match=r"image.*, not weights\. Images are named .*\. Give a"):
            vissl_zero.load_trunk(path)
    with pytest.raises(CheckpointError, match=r"There is no .*b\.jpg\. Did you mean 'a\.jpg'\? Give a file of weights"):
        vissl_zero.load_trunk(tmp_path / "b.jpg")


def test_nothing_that_the_folder_names_is_run(folder, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "planted_trunk.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = folder / "config.resolved.yaml"
    file.write_text(file.read_text().replace("IMPORTS: []", "IMPORTS: [planted_trunk]"))
    assert "planted_trunk" in file.read_text()
    vissl_zero.load_trunk(folder)
    file.write_text(file.read_text().replace("NAME: regnet", "NAME: planted"))
    with pytest.raises(CheckpointError, match=r"custom trunk, 'planted'\. Import the module .* planted_trunk did"):
        vissl_zero.load_trunk(folder)
    assert not canary.exists()
    with pytest.raises(CheckpointError, match=r"custom trunk"):
        vissl_zero.load_trunk(folder, imports=True)
    assert canary.exists(), "on request"


def _write_checkpoint(folder: Path, step: int, scale: float = 1.0) -> Path:
    """As a run of two ranks would have left it; the trunk's parameters are multiplied by ``scale``."""
    state = load_file(folder / FILE) if (folder / FILE).exists() else load_file(folder.parent / "final.safetensors")
    config = yaml.safe_load((folder / "config.resolved.yaml").read_text())["config"]
    is_buffer = ("running_mean", "running_var", "num_batches_tracked")
    tensors = {f"{'buffer' if n.endswith(is_buffer) else 'model'}/{n}": t for n, t in state.items()}
    tensors = {n: t * scale if n.startswith("model/") else t for n, t in tensors.items()}
    return write_checkpoint(folder, tensors, step, config)


def test_a_run_that_has_ended_is_not_called_unfinished(folder, recwarn):
    _write_checkpoint(folder, final_step(folder), scale=2.0)
    with pytest.raises(CheckpointError, match=r"holds no teacher\."):
        vissl_zero.load_trunk(folder, which="teacher")
    assert not [warning for warning in recwarn if "no final weights" in str(warning.message)]


def test_weights_of_others_without_a_teacher_are_not_taken_for_one(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"is of no run here, and holds no teacher .*Take the student"):
        vissl_zero.load_trunk(tmp_path / "a.pth", which="teacher")


def test_a_run_in_progress_gives_its_newest_complete_checkpoint(folder):
    final = load_file(folder / FILE)
    for step in (1, 2, 3):
        _write_checkpoint(folder, step, scale=1.0 + step)
    (folder / FILE).unlink()
    data = folder / "checkpoints/step_000000003/rank00001.safetensors"
    data.unlink()
    os.mkfifo(data)  # must not be waited for
    with pytest.warns(
        UserWarning, match=r"no final weights yet: these are of step 2, .*step_000000002\. Passed over: "
    ):
        trunk = vissl_zero.load_trunk(folder)
    name = "stem.0.weight"
    assert torch.equal(trunk.trunk.state_dict()[name], (3.0 * final[f"trunk.{name}"]).float())
    assert trunk.path.name == "step_000000002"
    trunk = vissl_zero.load_trunk(folder / "checkpoints/step_000000001")
    assert torch.equal(trunk.trunk.state_dict()[name], (2.0 * final[f"trunk.{name}"]).float())


def test_final_weights_go_before_checkpoints_of_no_later_step(folder):
    final = load_file(folder / FILE)["trunk.stem.0.weight"]
    _write_checkpoint(folder, 3, scale=5.0)
    assert torch.equal(vissl_zero.load_trunk(folder).trunk.state_dict()["stem.0.weight"], final.float())
    _write_checkpoint(folder, 4, scale=5.0)  # the run has been gone on with
    with pytest.warns(UserWarning, match="step 4"):
        assert torch.equal(vissl_zero.load_trunk(folder).trunk.state_dict()["stem.0.weight"], (5 * final).float())


def test_a_run_without_weights(folder):
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match="holds neither checkpoints nor weights"):
        vissl_zero.load_trunk(folder)


@pytest.mark.parametrize("how", ["cut", "bit", "fifo", "folder"])
def test_damaged_weights(folder, how):
    data = bytearray((folder / FILE).read_bytes())
    (folder / FILE).unlink()
    if how == "fifo":
        os.mkfifo(folder / FILE)
    elif how == "folder":
        (folder / FILE).mkdir()
    elif how == "cut":
        (folder / FILE).write_bytes(data[:-100])
    else:
        data[len(data) // 2] ^= 1
        (folder / FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors (is damaged|cannot be read)"):
        vissl_zero.load_trunk(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "config: [",
        "config: {}",
        "no config",
        "config: {MODEL: {TRUNK: [], HEAD: {}}, IMPORTS: [], DATA: {}}",
        "a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\nconfig: {MODEL: *b}",
        "[" * 10_000,
        "config: 2001-99-99",
    ],
)
def test_a_damaged_configuration(folder, text):
    (folder / "config.resolved.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.resolved\.yaml cannot be read \(.*\)\. Copy it again"):
        vissl_zero.load_trunk(folder)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("depth: 3", "depth: 1000000000", "its trunk is far larger|must be at most 10000"),
        ("depth: 3", "depth: 9000", "its trunk is far larger"),
        ("depth: 3", "depth: -1", "No trunk can be built"),
        ("depth: 3", "depth: [3]", "No trunk can be built"),
        (
            "depth: 3",
            "depth: ${oc.env:HOME}",
            r"config\.MODEL\.TRUNK\.REGNET\.depth is \$\{oc.env:HOME\}, and environment",
        ),
    ],
)
def test_a_hostile_configuration(folder, old, new, says):
    file = folder / "config.resolved.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=says):
        vissl_zero.load_trunk(folder)


def test_a_folder_cannot_have_the_environment_printed(folder, monkeypatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    file = folder / "config.resolved.yaml"
    text = file.read_text()
    for place in ("depth: 3", "NAME: regnet", "stem_type: RES_STEM_CIFAR"):
        assert place in text
        file.write_text(text.replace(place, place.split(":")[0] + ": ${oc.env:A_SECRET}"))
        with pytest.raises(CheckpointError) as caught:
            vissl_zero.load_trunk(folder)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value)), place


def test_a_value_that_another_key_gave(folder):
    file = folder / "config.resolved.yaml"
    text = file.read_text()
    assert "depth: 3" in text and "TOPK: 5" in text
    file.write_text(text.replace("TOPK: 5", "TOPK: 3").replace("depth: 3", "depth: ${config.NEAREST_NEIGHBOR.TOPK}"))
    assert vissl_zero.load_trunk(folder).feature_dim


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("trunk.stem.0.weight"), r"lacks trunk\.stem\.0\.weight\. The weights and config"),
        (lambda w: w.update({"trunk.more": torch.zeros(1)}), r"has, and the trunk of .* has not, trunk\.more\."),
        (lambda w: w.update({"trunk.stem.0.weight": torch.zeros(2)}), r"has in another shape trunk\.stem\.0\.weight"),
        (lambda w: [w.pop(name) for name in list(w)], r"lacks trunk\.[\w.]+ and \d+ more\."),
    ],
)
def test_weights_of_another_model(folder, change, message):
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE)
    with pytest.raises(CheckpointError, match=message):
        vissl_zero.load_trunk(folder)
