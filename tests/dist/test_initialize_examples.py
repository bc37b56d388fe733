"""The examples run as their first lines say, and are short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(name: str, *options: str, num_ranks: int) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_transformer_with_its_optimizer_on_disk(tmp_path):
    losses = _losses(_run("transformer.py", "--steps=20", f"--nvme_path={tmp_path}", num_ranks=2))
    assert losses[-1] < losses[0] - 1.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_torchvision_from_the_meta_device(tmp_path):
    output = _run("torchvision_digits.py", "--steps=12", f"--save={tmp_path / 'weights.pt'}", num_ranks=1)
    losses = _losses(output)
    assert losses[-1] < losses[0] - 0.5
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights["layer4.1.conv2.weight"].shape == (512, 512, 3, 3)
    assert "accuracy" in output


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_verify_proves_its_loop():
    assert _run("verify_loop.py", num_ranks=2).startswith("equal: 4 steps in float64")
