"""``load_trunk`` on run folders, whole and not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import vissl_zero
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.config.resolve import save_resolved
from vissl_zero.data.eval_images import build_eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError
from vissl_zero.evaluation.features import extract_features
from vissl_zero.reporting.weights_file import WeightsFile

FILE = "weights.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended: its folder, features of its TEST images, and the images."""
    folder = tmp_path_factory.mktemp("run")
    plan = make_plan(make_config(), folder, max_steps=3)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [WeightsFile()])
    save_resolved(plan, folder / "config.resolved.yaml")
    _, images = build_eval_images(plan.config["DATA"], plan.seed)
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


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no folder .*nowhere\. Give the run folder"):
        vissl_zero.load_trunk(tmp_path / "nowhere")


def test_a_folder_that_is_not_of_a_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no config\.resolved\.yaml"):
        vissl_zero.load_trunk(tmp_path)


def test_nothing_that_the_folder_names_is_run(folder, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "planted_trunk.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = folder / "config.resolved.yaml"
    file.write_text(file.read_text().replace("IMPORTS: []", "IMPORTS: [planted_trunk]"))
    assert "planted_trunk" in file.read_text()
    vissl_zero.load_trunk(folder)
    file.write_text(file.read_text().replace("NAME: regnet", "NAME: planted"))
    with pytest.raises(CheckpointError, match=r"trunk of its own, 'planted'\. Import the module .* planted_trunk did"):
        vissl_zero.load_trunk(folder)
    assert not canary.exists()
    with pytest.raises(CheckpointError, match=r"trunk of its own"):
        vissl_zero.load_trunk(folder, imports=True)
    assert canary.exists(), "on request"


def test_a_run_that_has_not_ended(folder):
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has no weights\.safetensors: that is written when a run ends"):
        vissl_zero.load_trunk(folder)


def test_damaged_weights(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors cannot be read: .*Copy it again"):
        vissl_zero.load_trunk(folder)


@pytest.mark.parametrize("text", ["", "config: [", "config: {}", "no config"])
def test_a_damaged_configuration(folder, text):
    (folder / "config.resolved.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.resolved\.yaml cannot be read \(\w+: .*\)\. Copy it again"):
        vissl_zero.load_trunk(folder)


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
