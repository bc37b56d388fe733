"""What strangers do with the installed package, from a wheel and from ``pip install -e``, in an environment of its own.

The environment sees the pinned dependencies of the one that runs the tests, through a path file, and nothing else of
it: neither the source tree nor an installed vissl-zero.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from vissl_zero.config.recipes import list_recipes

ROOT = Path(__file__).parents[2]
SOURCES = "vissl_zero", "configs", "setup.py", "pyproject.toml"
BROKEN = """\
[build-system]
requires = ["setuptools>=69"]
build-backend = "setuptools.build_meta"
[project]
name = "broken-plugin"
version = "1.0"
[project.entry-points."vissl_zero.components"]
cracked = "broken_plugin"
[project.entry-points."vissl_zero.recipes"]
absent = "no_such_package.recipes"
[tool.setuptools]
py-modules = ["broken_plugin"]
"""
CLASSY = """
import torch.distributed as dist
import vissl_zero.integration.classy  # the one import
from classy_vision.tasks import build_task
from classy_vision.trainer import ClassyTrainer
transform = {"name": "apply_transform_to_key", "key": "input", "transforms": [{"name": "ToTensor"}]}
task = build_task({
    "name": "vissl_zero_classification_task", "num_epochs": 1, "loss": {"name": "CrossEntropyLoss"},
    "dataset": {"train": {"name": "synthetic_image", "num_samples": 16, "crop_size": 8, "class_ratio": 0.5, "seed": 0,
                          "batchsize_per_replica": 8, "use_shuffle": False, "transforms": [transform]}},
    "model": {"name": "mlp", "input_dim": 192, "output_dim": 2, "hidden_dims": [8], "use_batchnorm": False},
    "optimizer": {"name": "vissl_zero", "zero": {"level": 3}, "base_optimizer": {"name": "sgd", "momentum": 0.9},
                  "param_schedulers": {"lr": {"name": "constant", "value": 0.1}}},
})
task.set_dataloader_mp_context("fork")
ClassyTrainer().train(task)
print("losses", len(task.losses), task.optimizer.optimizer.describe().splitlines()[0])
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment and an empty folder to work in."""

    python: Path
    work: Path

    def run(self, *command: str | Path, ok: bool = True) -> str:
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.work,
            env={**clean, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def install(self, *what: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index"]
        self.run(*pip, "--no-build-isolation", "--disable-pip-version-check", *what)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(request, tmp_path_factory) -> Environment:
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in [*tracked.split(), "README.md"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)  # conf/config is a link to configs/config
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=60)
    found = Environment(folder / "env/bin/python", folder / "work")
    found.work.mkdir()
    site = Path(found.run(found.python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    show_dependencies(folder / "dependencies", site)
    if request.param == "wheel":
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        found.run(*pip, "-w", folder / "dist", source)
        found.install(next((folder / "dist").glob("vissl_zero-*.whl")))
    else:
        found.install("-e", source)
    where = found.run(found.python, "-c", "import vissl_zero; print(vissl_zero.__file__)").strip()
    assert where.startswith(str(site if request.param == "wheel" else source)), where
    return found


def show_dependencies(folder: Path, site: Path) -> None:
    """Links to every installed package but vissl-zero, in a folder on the new environment's path."""
    folder.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.match(r"(__editable__|vissl_zero|focal_plugin|broken_plugin|.*\.pth$)", path.name):
            (folder / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{folder}\n")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_recipe_is_installed_and_the_quickstart_trains(environment):
    command = environment.python.parent / "vissl-zero"
    listed = set(re.findall(r"^\+?config\S+", environment.run(command, "list", "recipes"), re.MULTILINE))
    assert listed >= {recipe.argument for recipe in list_recipes()}
    run = [command, "config=quickstart/swav_digits", "config.TRAINER.MAX_STEPS=3", "config.CHECKPOINT.DIR=quickstart"]
    environment.run(*run)
    assert json.loads((environment.work / "quickstart/summary.json").read_text())["num_steps"] == 3
    for wheel in environment.work.parent.glob("dist/*.whl"):
        names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        assert {name for name in names if not name.endswith(".dist-info")} == {"vissl_zero"}


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_torchvision_imports_after_vissl_zero(environment):
    said = environment.run(environment.python, "-c", "import vissl_zero, torchvision; print(torchvision.models)")
    assert "torchvision.models" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hydra_program_of_a_stranger_shards_by_one_line_of_its_defaults(environment):
    folder = environment.work / "app"
    shutil.copytree(ROOT / "examples/hydra_app", folder, dirs_exist_ok=True)
    assert len((folder / "app.py").read_text().splitlines()) <= 40
    assert "- vissl_zero/zero: fsdp" in (folder / "config.yaml").read_text()
    alone = environment.run(environment.python, folder / "app.py")
    assert "level 3, 1 processes" in alone
    launcher = [environment.python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    two = environment.run(*launcher, folder / "app.py", "vissl_zero/zero=sdp")
    assert "level 2, 2 processes" in two
    sums = [float(text.rsplit("sum of weights", 1)[1].split()[0]) for text in (alone, two)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_installed_package_brings_a_loss_and_a_recipe(environment):
    package = environment.work / "plugin_package"
    shutil.copytree(ROOT / "examples/plugin_package", package)
    environment.install(*(["-e"] if environment.work.parent.name.startswith("editable") else []), package)
    command = [environment.python.parent / "vissl-zero", "config=focal/digits", "config.TRAINER.MAX_STEPS=3"]
    assert "config=focal/digits" in environment.run(command[0], "list", "recipes")
    environment.run(*command, "config.CHECKPOINT.DIR=run")
    summary = json.loads((environment.work / "run/summary.json").read_text())
    assert summary["level"] == 2 and summary["num_steps"] == 3 and summary["recipe"] == "focal/digits"
    for override, message in [
        ("config.LOSS.focal_loss.gama=1", "Did you mean 'gamma'"),
        ("config.LOSS.focal_loss.gamma=much", "config.LOSS.focal_loss.gamma: must be a number"),
        ("config.LOSS.focal_loss.gamma=-1", "gamma must be at least 0"),
    ]:
        plus = "+" if "gama" in override else ""
        said = environment.run(*command, "--dry-run", plus + override, ok=False)
        assert message in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_classy_vision_task_trains_after_one_import(environment):
    said = environment.run(environment.python, "-W", "ignore", "-c", CLASSY)
    assert "losses 2 ZeRO level 3 over 1 rank," in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_broken_plugin_is_named_and_left_out(environment):
    package = environment.work / "broken"
    package.mkdir()
    (package / "pyproject.toml").write_text(BROKEN)
    (package / "broken_plugin.py").write_text("raise RuntimeError('the plugin has\\na crack')\n")
    environment.install(package)
    try:
        command = [environment.python.parent / "vissl-zero", "config=quickstart/swav_digits"]
        said = environment.run(*command, "--dry-run")
        assert "'cracked': cannot be loaded" in said
        assert "'absent': cannot be loaded" in said
        assert said.count("Correct or uninstall the package 'broken-plugin'.") == 2 and "nothing was started" in said
        said = environment.run(*command, "config.LOSS.name=cracked_loss", ok=False)
        assert "must be a known loss" in said and "plugin 'cracked': cannot be loaded" in said
        assert "Traceback" not in said
    finally:
        environment.run(
            sys.executable, "-m", "pip", "--python", environment.python, "uninstall", "-q", "-y", "broken-plugin"
        )
