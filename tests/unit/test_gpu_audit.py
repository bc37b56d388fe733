"""The audit in docs/gpu.md names every file that calls CUDA, copies to a device or reads a tensor on the host."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vissl_zero"
HAZARD = re.compile(r"\bcuda\b|pin_memory|non_blocking|\bStream\(|\.item\(\)|\.tolist\(\)|\.cpu\(\)")


def test_no_file_with_a_hazard_is_left_out():
    audit = (ROOT / "docs" / "gpu.md").read_text().split("## Audit")[1].split("## What makes")[0]
    files_of_rows = [row.split(" | ")[0] for row in audit.splitlines()]
    named = {name for row in files_of_rows for name in re.findall(r"`([\w/]+(?:\.py|/\*))`", row)}
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not {name for name in named if not any(fnmatch(file, name) for file in texts)}
    hazards = {file for file, text in texts.items() if HAZARD.search(text)}
    assert len(hazards) > 60
    assert not {file for file in hazards if not any(fnmatch(file, name) for name in named)}
