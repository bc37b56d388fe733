"""The launcher's ranks are its own: nothing else that this process has started ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from vissl_zero.launch.rank_group import RankGroup


def test_ending_the_ranks_ends_no_other_child_of_this_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        group = RankGroup(2, 0, str(tmp_path), tmp_path, tmp_path / "logs", dict(os.environ))
        group.end()
        assert group.wait() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        assert other.poll() is None
        other.kill()
