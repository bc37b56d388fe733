"""What unit tests share: no cluster."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SLURM's commands fail at once: where they are installed without a cluster, each waits for it 9 seconds."""
    monkeypatch.setenv("SLURM_CONF", os.devnull)
