"""What README and docs/extending.md show works as printed: own head and optimizer, features and nearest neighbors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import vissl_zero
from tests.command_line import run_command
from tests.launch.test_quickstart import assert_learned
from tests.plugins.test_fresh_environment import show_dependencies
from vissl_zero.config.compose import compose

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXTENDING = (ROOT / "docs/extending.md").read_text()
CLUSTER = (ROOT / "docs/cluster.md").read_text()
ACTIVATE = "source .venv/bin/activate"


def block(language: str, first_line: str) -> str:
    """Return the one code block of README and docs/extending.md that starts with a given line."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README + EXTENDING, re.DOTALL)
    found = [text for text in blocks if text.startswith(first_line)]
    assert len(found) == 1, f"{len(found)} {language} blocks start with {first_line!r}"
    return found[0]


def write_parts(folder: Path) -> dict[str, str]:
    (folder / "configs/config").mkdir(parents=True)
    (folder / "my_parts.py").write_text(block("python", "# my_parts.py"))
    (folder / "configs/config/my_recipe.yaml").write_text(
        block("yaml", "# @package _global_\n# configs/config/my_recipe.yaml")
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_own_head_and_own_optimizer_train_at_level_1(tmp_path, monkeypatch):
    environment = write_parts(tmp_path)
    words = ["config=my_recipe", "config.TRAINER.MAX_STEPS=3", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2"]
    run_command(*words, f"config.CHECKPOINT.DIR={tmp_path}/run", timeout_s=360, cwd=tmp_path, env=environment)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["level"] == 1 and summary["num_steps"] == 3
    monkeypatch.syspath_prepend(str(tmp_path))  # as in a notebook beside my_parts.py
    trunk = vissl_zero.load_trunk(tmp_path / "run")
    features = trunk(torch.rand(8, 3, 32, 32))
    assert features.shape == (8, 64) and len(features.unique(dim=0)) == 8


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("eta_plus", "eta_pluss", "Did you mean 'eta_plus'"),
        ("scale: 2.0", "scal: 2.0", "Did you mean 'scale'"),
        ("scale: 2.0", "scale: much", "must be a number"),
    ],
)
def test_mistyped_keys_of_ones_own_are_refused(tmp_path, old, new, message):
    environment = write_parts(tmp_path)
    recipe = tmp_path / "configs/config/my_recipe.yaml"
    recipe.write_text(recipe.read_text().replace(old, new))
    words = ["config=my_recipe", f"config.CHECKPOINT.DIR={tmp_path}/run"]
    done = run_command(*words, timeout_s=100, returncodes=(2,), cwd=tmp_path, env=environment)
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_features_and_neighbors_of_photos_in_ten_lines(tmp_path, monkeypatch, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(40):
        Image.effect_noise((64, 64), 20 + 5 * index).convert("RGB").save(photos / f"{index:02d}.jpg")
    words = ["config=pretrain/simclr/my_photos", "config.TRAINER.MAX_STEPS=2", "config.DATA.TRAIN.DATA_PATHS=photos"]
    words += [
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
        "config.CHECKPOINT.DIR=runs/photos",
        "config.DATA.IMG_SIZE=32",
    ]
    run_command(*words, timeout_s=250, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    lines_of_python = block("python", "from pathlib import Path")
    assert len(lines_of_python.strip().splitlines()) <= 12
    exec(lines_of_python, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 40 and all(line.count(".jpg") == 6 for line in printed)
    assert all(line.split(" -> ")[0] not in line.split(" -> ")[1] for line in printed)


def test_the_readme_is_short_enough_to_finish():
    assert len(README.split()) <= 1100


def test_every_recipe_the_readme_names_composes():
    recipes = set(re.findall(r"config=([a-z0-9_]+/[\w/]+)", README))
    assert "quickstart/swav_digits" in recipes
    for recipe in recipes:
        compose(recipe)


def lines(fence: str) -> list[str]:
    """List command lines without comments: those of the README's plain code blocks, or of the table of machines."""
    if fence == "table":
        return re.findall(r"^\| [^|]+ \| [^|`]*`(vissl-zero [^`]+)`", CLUSTER, re.MULTILINE)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [line.split("  #")[0].rstrip() for word, text in blocks if not word for line in text.splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What ``git clone`` gives, and what the first ``make`` installs; the pins are those of this environment."""
    folder = tmp_path_factory.mktemp("clone") / "vissl_zero"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True, timeout=120)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    show_dependencies(folder.parent / "dependencies", folder / f".venv/lib/{version}/site-packages")
    install = [sys.executable, "-m", "pip", "--python", folder / ".venv/bin/python", "install", "-q", "--no-deps"]
    install += ["--no-index", "--no-build-isolation", "--disable-pip-version-check", "-e", folder]
    subprocess.run(install, check=True, timeout=400)
    for stamp in (".ready", ".installed"):
        (folder / ".venv" / stamp).touch()
    return folder


def type_in_a_new_shell(folder: Path, *typed: str, timeout: int = 1100) -> str:
    """What the lines print, typed one after the other into a shell that knows nothing of this environment."""
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder.parent), "LANG": "C.UTF-8"}
    script = "\n".join(["set -e", *typed])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=clean, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, script + done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_the_first_lines_work_literally_and_the_quickstart_learns(checkout):
    clone, *typed = lines("plain")[:4]
    assert clone == "git clone <this repository> && cd vissl_zero"
    assert typed == ["make quickstart", "source .venv/bin/activate", "vissl-zero list recipes"]
    said = type_in_a_new_shell(checkout, *typed)
    for text in ("data ", "loss ", "kNN top-1 ", "sharding ", "run folder", "config=supervised/folder"):
        assert text in said, text
    (folder,) = re.findall(r"; run folder (\S+)$", said, re.MULTILINE)
    assert_learned(Path(folder))


@pytest.mark.soak
@pytest.mark.timeout(1400)
def test_the_other_commands_are_accepted_as_printed(checkout):
    classes = (
        f"{split}/{name}" for split in ("train", "test", "folder/train", "folder/val") for name in ("cat", "dog")
    )
    for path in ("photos/a", *classes):
        (checkout / path).mkdir(parents=True, exist_ok=True)
        for index in range(40):
            Image.new("RGB", (64, 64), (index, 0, 0)).save(checkout / path / f"{index}.png")
    run = "config=quickstart/swav_digits config.TRAINER.MAX_STEPS=2 config.CHECKPOINT.DIR=runs/my_run"
    typed = [ACTIVATE, f"vissl-zero {run}"]
    for line in [*lines("plain"), *lines("table")]:
        if not line.startswith("vissl-zero ") or "SLURM" in line:  # the SLURM tests submit
            continue
        line = line.replace("<0 or 1>", "0").replace("<recipe>", "digits/simclr")
        line = line.replace("weights.pth", "runs/my_run")
        if "CHECKPOINT.DIR" not in line:  # it reads a run that a line before it would have written
            line = line.replace("runs/photos", "runs/my_run")
        is_training = line.startswith(("vissl-zero config=", "vissl-zero -m")) and "--dry-run" not in line
        typed.append(line + " --dry-run" * is_training)
    assert len(typed) > 12
    said = type_in_a_new_shell(checkout, *typed)
    dry_runs = sum("--dry-run" in line for line in typed)
    assert said.count("nothing was started") == dry_runs + 1  # the sweep has two runs
