"""docs/extending.md: its example trains as printed, and what a component lacks is named before the first step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import vissl_zero
from vissl_zero import cli
from vissl_zero.registry import REGISTRIES

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
NAMES = ("patch_trunk", "scaled", "smooth_loss", "best_loss", "stripes")


def block(language: str) -> str:
    """Return the page's last block of a language; tests/launch/test_readme.py runs those before it."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[-1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, in the working directory; what they register is forgotten afterwards."""
    (tmp_path / "configs/config").mkdir(parents=True)
    (tmp_path / "configs/config/mine.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    import sys

    sys.modules.pop("my_components", None)
    for registry in REGISTRIES.values():
        for name in NAMES:
            registry._components.pop(name, None)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains_and_its_trunk_can_be_used(folder):
    (folder / "my_components.py").write_text(block("python"))
    assert cli.main(["config=mine", f"config.CHECKPOINT.DIR={folder}/run"]) == 0
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["num_steps"] == 8 and summary["loss_best"] <= summary["loss_first"] and summary["top1"] >= 0.5
    features = vissl_zero.load_trunk(folder / "run")(torch.rand(2, 3, 32, 32))
    assert features.shape == (2, 24)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.feature_dim = width", "self.width = width", "must have feature_dim: an int"),
        ("return [maps.mean(dim=(2, 3))", "return [maps", "must return a list with a tensor (images, feature_dim)"),
        ("class Scaled(nn.Module)", "class Scaled(Plain)", "must be a torch.nn.modules.module.Module"),
        ("class SmoothLoss(Method)", "class SmoothLoss(nn.Module)", "must be a vissl_zero.methods.method.Method"),
        ("class BestLoss(Hook)", "class BestLoss", "must be a vissl_zero.engine.hook.Hook"),
        (
            "def on_record(self, run, record)",
            "def on_record(self, run)",
            "must take (self, run, record) (got best_loss: BestLoss.on_record)",
        ),
        ("def name(self, index)", "def title(self, index)", "must have name: name(index), what messages call"),
    ],
)
def test_what_is_missing_is_named_by_a_dry_run(folder, capfd, old, new, message):
    text = block("python").replace(old, new)
    plain = "class Plain:\n    def forward(self, features): ...\n    def __setattr__(self, name, value): ...\n"
    (folder / "my_components.py").write_text(
        text.replace("@dataclass\nclass ScaledConfig", f"{plain}\n\n@dataclass\nclass ScaledConfig")
    )
    assert cli.main(["config=mine", "--dry-run"]) == 2
    said = capfd.readouterr().err
    assert message in said and "extending.md" in said and "Traceback" not in said
