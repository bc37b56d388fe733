"""These tests run on the cluster of ``cluster.sh`` and skip without it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _empty_queue() -> Iterator[None]:
    """Whatever a test leaves in the queue is its failure, and nobody else's."""
    yield
    left = subprocess.run(["squeue", "-h", "-o", "%A %j %T"], capture_output=True, text=True, check=False).stdout
    if left:
        subprocess.run(["scancel", f"--user={os.environ.get('USER', 'root')}"], check=False)
        for _ in range(100):
            if not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=False).stdout:
                break
            time.sleep(0.2)
    assert not left, f"left in the queue:\n{left}"
