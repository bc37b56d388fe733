"""Which ranks train together, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch, vissl_zero
from vissl_zero.errors import ConfigError
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
try:
    model, optimizer = vissl_zero.initialize(model, dict(type="SGD", lr=0.1), dict(level=3))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print(torch.distributed.get_world_size())
except ConfigError as error:
    print(error)
"""


def _run(arguments: list[str], **variables: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, *arguments]
    environment = clean | {"OMP_NUM_THREADS": "1"} | variables
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    # Python's warnings only: on a busy machine torchrun's agent logs remarks of its own.
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_alone_without_torchrun():
    assert _run(["-c", SCRIPT]) == "1"


@pytest.mark.slow
def test_half_an_environment_is_refused():
    assert _run(["-c", SCRIPT], RANK="0").startswith("environment: has RANK but not WORLD_SIZE")


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    printed = _run(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)])
    assert printed.split() in (["2", "2"], ["22"])  # two ranks write to one terminal; lines may run together
