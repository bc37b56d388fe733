"""Ranks end with their launcher, however that ends, and nothing else that it has started ends with them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vissl_zero.launch.rank_group import RankGroup, be_killed_first

# Stands in for torch, so that ranks stay where they import it.
WAITS = """
import os, pathlib, time
pathlib.Path(os.environ["VISSL_ZERO_SCRATCH"], f"rank.{os.getpid()}").touch()
time.sleep(600)
"""
LAUNCHER = """
import os, sys, time
from pathlib import Path
from vissl_zero.launch.rank_group import RankGroup

folder = Path(sys.argv[1])
RankGroup(2, 0, str(folder), folder, folder / "logs", dict(os.environ))
time.sleep(600)
"""


def test_ending_the_ranks_ends_no_other_child_of_this_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        group = RankGroup(2, 0, str(tmp_path), tmp_path, tmp_path / "logs", dict(os.environ))
        group.end()
        assert group.wait() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        assert other.poll() is None
        other.kill()


def test_ranks_that_were_started_end_where_a_later_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def second_fails(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(["sleep", "60"]))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        RankGroup(3, 0, str(tmp_path), tmp_path, tmp_path / "logs", dict(os.environ))
    assert [rank.poll() for rank in started] == [-signal.SIGKILL] * 2


def test_the_kernel_takes_a_rank_before_its_launcher(tmp_path: Path) -> None:
    scores = tmp_path / "oom_score_adj"
    for before, after in ((0, 100), (-500, -400), (950, 1000)):
        scores.write_text(f"{before}\n")
        be_killed_first(scores)
        assert int(scores.read_text()) == after
    be_killed_first(tmp_path / "none")  # systems other than Linux


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(WAITS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as launcher:
        deadline = time.monotonic() + 60.0
        while len(ranks := [int(file.suffix[1:]) for file in tmp_path.glob("rank.*")]) < 2:
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.02)
        launcher.kill()
    while left := [pid for pid in ranks if _is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
