"""Ranks talk to each other only, whoever else is on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RANK = """
import os, sys, time, torch
from vissl_zero.launch.process_group import process_group

if os.environ["RANK"] == "1":
    time.sleep(3.0)  # time for a stranger
with process_group("gloo", torch.device("cpu"), 20.0):
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2.0
"""
# Connects to every listener, with each of the numbers that gloo may wait for.
STRANGER = """
import socket, struct, time
from pathlib import Path

seen, held = set(), []
while True:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    for port in {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"} - seen:
        seen.add(port)
        for number in range(16):
            try:
                held.append(socket.create_connection(("127.0.0.1", port)))
                held[-1].send(struct.pack("<Q", number))
            except OSError:
                pass
    time.sleep(0.001)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("user", [None, 65534])
def test_another_user_who_connects_to_starting_ranks_is_noticed(tmp_path: Path, user: int | None) -> None:
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "setpriv"))):
        pytest.skip("needs root, for a network namespace and another user in it")
    # The first on the path may lie in root's home, where another user cannot go.
    theirs = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if theirs is None:
        pytest.skip("needs a Python that every user may run")
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "stranger.py").write_text(STRANGER)
    tmp_path.chmod(0o755)
    stranger = f'setpriv --reuid {user} --clear-groups {theirs} -c "$(cat stranger.py)" & other=$!;' if user else ""
    ranks = "RANK=0 $PY rank.py & one=$!; RANK=1 $PY rank.py; wait $one; code=$?"
    line = f"ip link set lo up; {stranger} {ranks}; {'kill $other;' if user else ''} exit $code"
    environment = {"PY": sys.executable, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, **environment, "VISSL_ZERO_STORE": str(tmp_path / "store")},
    )
    assert (f"Another user of this machine (uid {user}) has connected" in done.stderr) == (user is not None), (
        done.stderr
    )
    assert user or done.returncode == 0, done.stderr
