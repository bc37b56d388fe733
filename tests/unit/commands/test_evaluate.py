"""``vissl-zero evaluate`` and ``embed``: any weights on a folder of images, as scripts rely on them."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import vissl_zero
from vissl_zero.cli import main
from vissl_zero.commands.evaluate import _hardest, _overrides, _without_overrides
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.feature_quality import by_class

COLORS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy images of three colors, in class folders; their weights beside them."""
    root, numbers = tmp_path_factory.mktemp("my photos (2)"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name, color in COLORS.items():
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(numbers.normal(0, 60, (40, 40, 3)) + np.array(color), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{index}.jpg")
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=64, num_heads=1)
    torch.save(net.state_dict(), root / "tiny.pth")
    return root


SMALL = ["config.DATA.NUM_DATALOADER_WORKERS=0", "config.MACHINE.DEVICE=cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 3])
def test_evaluate_prints_the_figures_that_scripts_read(folder, level, capfd):
    words = [str(folder / "tiny.pth"), "--data", str(folder), "--json", *SMALL, f"config.ZERO.LEVEL={level}"]
    words += ["config.DISTRIBUTED.NUM_PROC_PER_NODE=2"] * (level > 0)
    assert main(["evaluate", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["knn_top1"] == 1.0 and found["knn_k"] == 20 and found["knn_temperature"] == 0.07
    assert found["linear_top1"] == 1.0 and found["num_features"] == 64
    assert found["num_train"] == 36 and found["num_val"] == 12
    assert found["image_size"] == 32
    assert found["recognized"].startswith("vision transformer: 1 block of 64, 1 head, patches of 16")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluate_leaves_broken_files_out_and_names_the_hardest_classes(folder, tmp_path, num_ranks, capfd):
    """A photo of another color in a class is what the probe must take for that color."""
    photos = tmp_path / "photos"
    for split in ("train", "val"):
        shutil.copytree(folder / split, photos / split)
        (photos / split / "green" / "1.jpg").write_bytes(b"no image")
    shutil.copy(folder / "val/blue/0.jpg", photos / "val/red/0.jpg")
    words = [str(folder / "tiny.pth"), "--data", str(photos), *SMALL]
    words += [f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_ranks}"]
    assert main(["evaluate", *words, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["num_train"] == 35 and figures["num_val"] == 11
    assert figures["skipped"] == [str(photos / split / "green" / "1.jpg") for split in ("train", "val")]
    assert figures["linear_top1"] == pytest.approx(10 / 11)
    right = {"top1": 1.0, "taken_for": None, "num_taken": 0}
    assert figures["linear_by_class"] == {
        "blue": {**right, "num_images": 4},
        "green": {**right, "num_images": 3},
        "red": {"top1": 0.75, "num_images": 4, "taken_for": "blue", "num_taken": 1},
    }
    if num_ranks == 1:
        assert main(["evaluate", *words]) == 0
        text = capfd.readouterr().out
        assert f"Hardest for the linear probe of {folder / 'tiny.pth'}: red 75.0% (taken for blue: 1 of 4)." in text
        assert "broken and left out: " in text and "green/1.jpg" in text


def test_the_hardest_classes_come_first():
    labels, predicted = np.array([0, 0, 0, 1, 1, 2, 3]), np.array([0, 1, 2, 2, 2, 2, 3])
    classes = by_class(labels, predicted, ["a", "b", "c", "d"])
    assert classes["a"] == {"top1": 1 / 3, "num_images": 3, "taken_for": "b", "num_taken": 1}  # of equals, the first
    assert classes["b"] == {"top1": 0.0, "num_images": 2, "taken_for": "c", "num_taken": 2}
    assert _hardest(classes) == "b 0.0% (taken for c: 2 of 2), a 33.3% (taken for b: 1 of 3)"
    many = by_class(np.arange(7), np.full(7, 7), [str(number) for number in range(8)])
    assert _hardest(many).count("taken for 7") == 5


@pytest.mark.parametrize(
    "ending",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("csv", "parquet")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("npz", "safetensors")),
    ],
)
def test_embed_writes_the_features_of_load_trunk_with_names(folder, tmp_path, ending, capfd):
    out = tmp_path / "deep" / f"features.{ending}"
    assert main(["embed", str(folder / "tiny.pth"), str(folder / "val"), "--out", str(out), *SMALL]) == 0
    if ending == "npz":
        with np.load(out) as file:
            features, names = file["features"], list(file["names"])
    elif ending == "safetensors":
        from safetensors import safe_open

        features = load_file(out)["features"].numpy()
        with safe_open(out, "pt") as file:
            names = json.loads(file.metadata()["names"])
    elif ending == "csv":
        header, *lines = csv.reader(out.read_text("utf-8").splitlines())
        assert header == ["name", *map(str, range(64))]
        names, features = [line[0] for line in lines], np.array([line[1:] for line in lines], dtype=np.float32)
    else:
        from pyarrow import parquet

        table = parquet.read_table(out)
        names, features = table["name"].to_pylist(), np.array(table["features"].to_pylist())
    assert names == sorted(f"{color}/{index}.jpg" for color in COLORS for index in range(4))
    trunk = vissl_zero.load_trunk(folder / "tiny.pth")
    views = torch.stack([trunk.transform(Image.open(folder / "val" / name)) for name in names])
    with torch.no_grad():
        np.testing.assert_allclose(features, trunk(views).numpy(), rtol=1e-5, atol=1e-5)
    written = capfd.readouterr()
    assert "12 images, 64 features each" in written.out
    # The run's own folder is gone when the user reads this.
    assert not re.search(r"run folder|report  |Features of", written.err)


@pytest.mark.soak
def test_embed_leaves_broken_files_out_and_names_them_on_any_number_of_ranks(folder, tmp_path, capfd):
    """No row may stand under the name of another image; odd names survive."""
    photos, names = tmp_path / "photos", ["a\u2028b.jpg", "b.jpg", "d.JPG", "e.jpeg", os.fsdecode(b"f\xff.jpg")]
    photos.mkdir()
    for index, name in enumerate(names):
        shutil.copy(folder / f"val/{'red' if index % 2 else 'blue'}/{index % 4}.jpg", photos / name)
    (photos / "c.jpg").write_bytes(b"no image")
    rows = []
    for num_ranks in (1, 2):
        words = [*SMALL, f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_ranks}"]
        out = tmp_path / f"{num_ranks}.npz"
        assert main(["embed", str(folder / "tiny.pth"), str(photos), "--out", str(out), *words]) == 0
        said = capfd.readouterr().out
        assert "5 images, 64 features each" in said and "left out" in said and "c.jpg" in said
        with np.load(out) as file:
            assert sorted(file["names"]) == sorted(names)
            rows.append(file["features"][np.argsort(file["names"])])
    np.testing.assert_allclose(*rows, atol=1e-6)
    trunk = vissl_zero.load_trunk(folder / "tiny.pth")
    views = torch.stack([trunk.transform(Image.open(photos / name)) for name in sorted(names)])
    with torch.no_grad():
        np.testing.assert_allclose(rows[0], trunk(views).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_python_gives_the_figures_and_features_of_the_commands(folder):
    small = dict(word.split("=") for word in SMALL)
    found = vissl_zero.evaluate(folder / "tiny.pth", folder, small)
    assert found["knn_top1"] == found["linear_top1"] == 1.0 and found["num_val"] == 12
    features, names = vissl_zero.embed(folder / "tiny.pth", folder / "val", small)
    assert names == sorted(f"{color}/{index}.jpg" for color in COLORS for index in range(4))
    trunk = vissl_zero.load_trunk(folder / "tiny.pth")
    views = torch.stack([trunk.transform(Image.open(folder / "val" / name)) for name in names])
    with torch.no_grad():
        np.testing.assert_allclose(features, trunk(views).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["embed", "a.pth", ".", "--output", "x.npz"], r"--output is not a flag. Did you mean '--out'"),
        (["evaluate", "a.pth"], "the following arguments are required: --data"),
        (["evaluate", "a.pth", "--data", "."], r"must be a folder that holds train/ and val/, each with a folder"),
        (["evaluate", "a.pth", "--data", ""], "--data: must be a path, and is empty"),
        (["evaluate", "a.pth", "--data", "nowhere"], "nowhere: there is no such file or folder. Correct the path"),
        (["evaluate", "a.pth", "--data", "a.txt"], "--data a.txt: must be a folder .*, and is a file. Name"),
        (["evaluate", "", "--data", "data"], "weights: must be a path, and is empty"),
        (
            ["embed", "a.pth", ".", "--out", "a.txt/x.npz"],
            "a.txt/x.npz: must be in a folder, and a.txt is a file. Name",
        ),
        (["export", "a.pth", "--to", "timm", "--out", "a.txt/x"], "a.txt/x: must be in a folder, and a.txt is a file"),
        (["compare", "a", "b", "--html", "a.txt/x"], "a.txt/x: must be in a folder, and a.txt is a file"),
        (["compare", "a", "b", "--html", "data"], "data: must be a file, and is a folder. Name a file in it"),
        (["plan", "config=digits/mae", "--png", "a.txt/x"], "a.txt/x: must be in a folder, and a.txt is a file"),
        (["lr-find", "config=digits/mae", "--png", "a.txt/x"], "a.txt/x: must be in a folder, and a.txt is a file"),
        (["data", "pack", ".", "a.txt/x", "--to", "arrow"], "a.txt/x: must be in a folder, and a.txt is a file"),
        (["embed", "a.pth", ".", "--out", "x.txt"], r"must be one of .npz, .csv, .parquet, .safetensors"),
        (["embed", "a.pth", "nowhere", "--out", "x.npz"], "nowhere: there is no such file or folder"),
        (["embed", "a.txt", ".", "--out", "/proc/x.npz"], r"--out /proc/x.npz: cannot be written \(No such file"),
    ],
)
def test_wrong_words_get_a_sentence(words, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    for name in ("train", "val"):
        (tmp_path / "data" / name).mkdir(parents=True)
    assert main(words) == 2
    assert re.search(wanted, capsys.readouterr().err)


@pytest.mark.slow
def test_weights_of_nan_are_refused(folder, tmp_path, capfd):
    torch.save(
        {key: value * float("nan") for key, value in torch.load(folder / "tiny.pth").items()}, tmp_path / "a.pth"
    )
    for words in (["embed", str(folder / "val"), "--out", "x.npz"], ["evaluate", "--data", str(folder)]):
        assert main([words[0], str(tmp_path / "a.pth"), *words[1:], *SMALL]) == 2
        assert re.search(r"The features of \d+ of \d+ images are NaN or infinite", capfd.readouterr().err)


@pytest.mark.slow
def test_weights_that_are_not_there_end_with_the_commands_code(folder, capfd):
    assert main(["evaluate", "torchhub:dinov2_vits14_reg", "--data", str(folder)]) == 2
    assert "curl -L --create-dirs" in capfd.readouterr().err


def test_a_file_may_be_called_as_an_override_begins():
    words = ["config.pth", "hydra_run/weights.pth", "config.ZERO.LEVEL=3", "+config/zero=both", "~config.HOOKS.X"]
    assert _overrides(words) == words[2:]
    assert _without_overrides(words) == words[:2]


def _running(text: str) -> list[int]:
    """Processes with a text in their command line, those that have ended apart."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if text in (folder / "cmdline").read_text() and state not in "ZX":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_embed_takes_its_run_and_its_folder_along(folder, tmp_path, number):
    command = [sys.executable, "-m", "vissl_zero.cli", "embed", str(folder / "tiny.pth"), str(folder / "val")]
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets need a short name
        environment = {**os.environ, "TMPDIR": short}
        process = subprocess.Popen([*command, "--out", str(tmp_path / "x.npz"), *SMALL], env=environment)
        deadline = time.monotonic() + 60
        while len(_running(short)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(_running(short)) >= 2  # the run, and what removes the folder
        process.send_signal(number)
        assert process.wait(timeout=30) == (143 if number == signal.SIGTERM else -9)
        while (_running(short) or list(Path(short).iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _running(short) and not list(Path(short).iterdir())


@pytest.mark.soak
def test_embed_says_what_it_does_before_its_work(folder, tmp_path, capfd):
    """The network, the images' size, photos that are not read; and from Python an error is its sentence alone."""
    photos = tmp_path / "photos"
    shutil.copytree(folder / "val/red", photos)
    (photos / "x.heic").touch()
    words = [str(folder / "tiny.pth"), str(photos), "--out", str(tmp_path / "x.npz"), *SMALL]
    assert main(["embed", *words, "config.DATA.IMG_SIZE=48"]) == 0
    said = capfd.readouterr().err
    assert f"note: 1 file in {photos} is left out: .heic 1 (convert it to JPEG or PNG)." in said
    assert "network: vision transformer: 1 block of 64" in said
    assert "images: shorter side resized to 48, center crop 48 x 48, mean 0.485, 0.456, 0.406, std" in said
    assert main(["embed", *words, "--quiet"]) == 0
    note = capfd.readouterr().err
    assert note.startswith("note: 1 file in ") and note.count("\n") == 1
    vissl_zero.embed(folder / "tiny.pth", photos, dict(word.split("=") for word in SMALL))
    assert capfd.readouterr().err == note
    (photos / "y.jpg").write_bytes(b"no image")
    small = dict(word.split("=") for word in SMALL)
    _, names = vissl_zero.embed(folder / "tiny.pth", photos, small)
    assert "y.jpg" in capfd.readouterr().err and "y.jpg" not in names
    with pytest.raises(ConfigError) as caught:
        vissl_zero.embed(folder / "tiny.pth", photos, small | {"config.DATA.ON_BROKEN_IMAGE": "raise"})
    assert str(caught.value).startswith(f"The image {photos}/y.jpg cannot be used: ")
