"""Ranks talk to each other only, whoever else is on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from vissl_zero.launch import process_group
from vissl_zero.launch.process_group import is_first_to_fail

ROOT = Path(__file__).parents[3]
RANK = """
import os, sys, time, torch
import torch.distributed as dist
from vissl_zero.launch.process_group import process_group

if os.environ["RANK"] == "1":
    time.sleep(2.0)  # time for a stranger
with process_group("gloo", torch.device("cpu"), 60.0):
    for _ in range(5):
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group())
        assert total.item() == 2.0
        time.sleep(0.2)
        assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.distributed_c10d.ProcessGroupGloo)
"""
# Connects to every listener, with each of the numbers that gloo may wait for; stays, goes at once, or says nothing and
# comes again until no descriptor is left.
STRANGER = """
import socket, struct, sys, time
from pathlib import Path

seen, held, connections = set(), [], 0
while True:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}
    for port in ports if sys.argv[1] == "floods" else ports - seen:
        seen.add(port)
        for number in range(16):
            try:
                sock = socket.socket()
                sock.settimeout(0.05)
                sock.connect(("127.0.0.1", port))
                if sys.argv[1] != "floods":
                    sock.send(struct.pack("<Q", number))
                if sys.argv[1] == "goes":
                    sock.close()
                held.append(sock)
                connections += 1
                print(connections, file=open(sys.argv[2], "w"), flush=True)
            except OSError:
                pass
    time.sleep(0.001)
"""


def ranks_beside(folder: Path, interface: str, stranger: str, user: int | None) -> tuple[str, int, int]:
    """Two ranks in a network of their own, beside another user who does what ``STRANGER`` says.

    Returns:
        What the ranks wrote, their worst exit code, and the stranger's connections.
    """
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "setpriv"))):
        pytest.skip("needs root, for a network namespace and another user in it")
    # The first on the path may lie in root's home, where another user cannot go.
    theirs = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if theirs is None:
        pytest.skip("needs a Python that every user may run")
    (folder / "rank.py").write_text(RANK)
    (folder / "stranger.py").write_text(STRANGER)
    (folder / "count").touch()
    (folder / "count").chmod(0o666)
    folder.chmod(0o755)
    network = f"ip link set lo name {interface}; ip link set {interface} up;"
    other = f'ulimit -n 20000; exec setpriv --reuid {user} --clear-groups {theirs} -c "$(cat stranger.py)"'
    other = f"({other} {stranger} count) & other=$!;" if user else ""
    ranks = (
        "ulimit -Sn 200; RANK=0 $PY rank.py & one=$!; RANK=1 $PY rank.py & two=$!; "
        "wait -n $one $two; code=$?; [ $code = 0 ] || kill -9 $one $two; wait $one && wait $two || code=1"
    )
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", f"{network} {other} {ranks}; {'kill $other;' if user else ''} exit $code"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=folder,
        env={
            **os.environ,
            **{"PY": sys.executable, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": interface},
            "VISSL_ZERO_STORE": str(folder / "store"),
        },
    )
    return done.stderr, done.returncode, int((folder / "count").read_text() or 0)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("stranger", ["stays", "goes", "floods"])
def test_another_user_who_connects_to_starting_ranks_is_not_heard(tmp_path: Path, stranger: str) -> None:
    text, code, connections = ranks_beside(tmp_path, "lo", stranger, 65534)
    assert code == 0, text
    assert connections >= (200 if stranger == "floods" else 16), connections


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("user", [None, 65534])
def test_another_user_who_connects_over_another_interface_is_noticed(tmp_path: Path, user: int | None) -> None:
    text, code, _ = ranks_beside(tmp_path, "d0", "stays", user)
    assert (f"Another user of this machine (uid {user}) has connected" in text) == (user is not None), text
    assert user or code == 0, text


class _SilentStore(dist.Store):
    """As of a machine that is gone: it never answers."""

    def add(self, key: str, amount: int) -> int:
        threading.Event().wait()
        return 1


def test_the_rank_that_failed_first_is_known_whatever_the_errors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_store", None)
    assert is_first_to_fail(), "it has met nobody"
    monkeypatch.setattr(process_group, "_store", dist.HashStore())
    assert [is_first_to_fail() for _ in range(3)] == [True, False, False]
    monkeypatch.setattr(process_group, "_store", _SilentStore())
    monkeypatch.setattr(process_group, "_ANSWER_S", 0.1)
    assert not is_first_to_fail()
