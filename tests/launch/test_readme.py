"""What the README shows works as printed: a head and an optimizer of one's own, and the trunk in five lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vissl_zero
from vissl_zero.config.compose import compose

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str, first_line: str) -> str:
    """The code block of the README that starts with a given line."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if text.startswith(first_line)]
    assert len(found) == 1, f"{len(found)} {language} blocks start with {first_line!r}"
    return found[0]


def write_parts(folder: Path) -> dict[str, str]:
    (folder / "configs/config").mkdir(parents=True)
    (folder / "my_parts.py").write_text(block("python", "# my_parts.py"))
    (folder / "configs/config/my_recipe.yaml").write_text(
        block("yaml", "# @package _global_\n# configs/config/my_recipe.yaml")
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.timeout(200)
def test_own_head_and_own_optimizer_train_at_level_1(tmp_path, monkeypatch):
    environment = write_parts(tmp_path)
    command = [sys.executable, "-m", "vissl_zero.cli", "config=my_recipe", "config.TRAINER.MAX_STEPS=3"]
    command += [f"config.CHECKPOINT.DIR={tmp_path}/run", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["level"] == 1 and summary["num_steps"] == 3
    monkeypatch.syspath_prepend(str(tmp_path))  # as in a notebook beside my_parts.py
    trunk = vissl_zero.load_trunk(tmp_path / "run")
    features = trunk(torch.rand(8, 3, 32, 32))
    assert features.shape == (8, 64) and len(features.unique(dim=0)) == 8


@pytest.mark.timeout(60)
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
    command = [sys.executable, "-m", "vissl_zero.cli", "config=my_recipe", f"config.CHECKPOINT.DIR={tmp_path}/run"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_every_recipe_the_readme_names_composes():
    recipes = set(re.findall(r"config=([a-z0-9_]+/[\w/]+)", README))
    assert "quickstart/swav_digits" in recipes
    for recipe in recipes:
        compose(recipe)
