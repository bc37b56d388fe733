"""These tests run on the cluster of ``cluster.sh`` and skip without it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _is_up() -> bool:
    try:
        answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "vissl-zero-tests" in answer.stdout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Asked once, and only where something of this folder is collected."""
    own = [item for item in items if item.path.parent.name == "slurm" and item.path.parent.parent.name == "tests"]
    if own and not _is_up():
        for item in own:
            item.add_marker(pytest.mark.skip(reason="the cluster of tests/slurm/cluster.sh is not up"))


def jobs_of(folder: Path) -> dict[str, str]:
    """Jobs in the queue that were submitted from a folder: id -> name and state. Others may use the cluster too."""
    answer = subprocess.run(["squeue", "-h", "-o", "%A|%Z|%j %T"], capture_output=True, text=True, check=False).stdout
    rows = [line.split("|") for line in answer.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) == 3 and Path(row[1]).is_relative_to(folder)}


@pytest.fixture(autouse=True)
def _empty_queue(tmp_path: Path) -> Iterator[None]:
    """Jobs that a test leaves in the queue are that test's failure."""
    yield
    left = jobs_of(tmp_path)
    if left:
        subprocess.run(["scancel", *left], check=False)
        deadline = time.monotonic() + 20
        while jobs_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert not left, f"left in the queue: {left}"
