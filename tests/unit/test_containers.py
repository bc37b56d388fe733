"""The container files: versions stand in requirements.txt alone, and Python is the one that setup.py asks for."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_containers_take_every_version_from_the_pins():
    dockerfile = (ROOT / "containers/Dockerfile").read_text()
    environment = (ROOT / "containers/environment.yml").read_text()
    least = re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())
    assert least is not None
    assert f"FROM python:{least[1]}-slim AS base" in dockerfile and f"python={least[1]}\n" in environment
    assert re.findall(r"\b[\w-]+==\d", dockerfile + environment) == []
    assert dockerfile.count("pip install -r requirements.txt") == 2 and "-r ../requirements.txt" in environment


def test_the_build_without_cuda_pins_torch_by_the_same_lines():
    pattern = re.search(r"grep -E '(.+)' requirements.txt", (ROOT / "containers/Dockerfile").read_text())
    assert pattern is not None
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if re.search(pattern[1], line)]
    assert [line.partition("==")[0] for line in lines] == ["torch", "torchvision"]
