"""The hour on a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_rehearsal_fills_file_and_table(tmp_path):
    file, table = tmp_path / "hour.json", tmp_path / "gpu.md"
    command = [sys.executable, "tools/gpu_hour.py", "--rehearse", "--json", str(file), "--table", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["phase"] for row in rows] == ["tests", "speed", "input"]
    assert [row["system"] for row in rows[1]["rows"]][-1] == "level 3"
    assert [row["system"] for row in rows[2]["rows"]] == ["augmented on workers", "augmented on device"]
    assert table.read_text().count("\n| ") == 4 + sum(1 + len(row.get("rows", [])) for row in rows)
    assert "at most" in done.stdout.splitlines()[0]
    subprocess.run(command, check=True, timeout=60, capture_output=True)  # what is done is not run again
    assert json.loads(file.read_text()) == rows
