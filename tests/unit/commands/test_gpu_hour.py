"""The hour on a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


def _images(folder: Path) -> Path:
    """Draw images of two classes, as CIFAR-10's folders have them."""
    draw = random.Random(0)
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            for number in range(16):
                image = Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3))
                image.save(folder / split / label / f"{number}.png")
    return folder


@pytest.mark.slow
def test_rehearsal_fills_file_and_table(tmp_path):
    file, table = tmp_path / "hour.json", tmp_path / "gpu.md"
    command = [sys.executable, "tools/gpu_hour.py", "--rehearse", "--json", str(file), "--table", str(table)]
    command += ["--cifar", str(_images(tmp_path / "cifar"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    phases = ["tests", "ranks", "speed", "input", "offload", "packing", "forecast", "cifar"]
    assert [row["phase"] for row in rows] == phases
    by_phase = {row["phase"]: row for row in rows}
    assert by_phase["ranks"]["rows"][0]["distance"] < 1e-10
    assert [row["system"] for row in by_phase["speed"]["rows"]][-1] == "level 3"
    assert [row["system"] for row in by_phase["input"]["rows"]] == ["augmented on workers", "augmented on device"]
    assert [row["system"] for row in by_phase["forecast"]["rows"]] == ["level 0", "level 2", "level 3"]
    assert all(0.9 < row["forecast over measured"] < 1.1 for row in by_phase["forecast"]["rows"])
    assert "packed over not" in by_phase["packing"]["result"]
    assert "kNN top-1" in by_phase["cifar"]["result"]
    assert table.read_text().count("\n| ") == 4 + sum(1 + len(row.get("rows", [])) for row in rows)
    assert "at most" in done.stdout.splitlines()[0]
    subprocess.run(command, check=True, timeout=60, capture_output=True)  # what is done is not run again
    assert json.loads(file.read_text()) == rows
