"""Launchers that meet: only with the secret, only with the same plan, and never silently alone."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from vissl_zero.errors import LaunchError
from vissl_zero.launch.failure import Failure
from vissl_zero.launch.key_value_store import (
    Client,
    KeyValueServer,
    RefusedError,
    interface_towards,
    load_secret,
    receive,
    send,
)
from vissl_zero.launch.process_group import NetworkStore
from vissl_zero.launch.rendezvous import LauncherSpec, Rendezvous

SECRET = b"s" * 32
ENDED: list[int] = []  # one for each launcher that has ended its ranks
# A server, a stranger who opens connections and says nothing (or a byte a second), and one who holds the secret.
STRANGER = """
import resource, socket, sys, threading, time
from vissl_zero.launch import key_value_store
from vissl_zero.launch.key_value_store import Client
from vissl_zero.launch.key_value_store import KeyValueServer

resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))
key_value_store._HANDSHAKE_S = 3.0 if sys.argv[1] == "slow" else 60.0
server = KeyValueServer(("127.0.0.1", 0), b"s" * 32)
if sys.argv[1] == "slow":
    began = time.monotonic()
    sock = socket.create_connection(server.address)
    try:
        for letter in b"\\0\\0\\0\\x20" + b"x" * 32:
            sock.send(bytes([letter]))
            time.sleep(0.5)
    except OSError:
        pass
    assert time.monotonic() - began < 8.0, "a byte now and then held the connection"
else:
    held = [socket.create_connection(server.address) for _ in range(400)]
    deadline = time.monotonic() + 20.0
    while threading.active_count() > 100:
        assert time.monotonic() < deadline, threading.active_count()
        time.sleep(0.1)
    Client(server.address, b"s" * 32, 5.0).call(b"set", b"a", b"1")
server.close()
"""


@pytest.fixture
def server():
    found = KeyValueServer(("127.0.0.1", 0), SECRET)
    yield found
    found.close()


def test_a_store_for_torch(server):
    store = NetworkStore(Client(server.address, SECRET, 5.0), 5.0)
    store.set("a", "1")
    assert store.get("a") == b"1" and store.check(["a"]) and not store.check(["a", "b"])
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.compare_set("a", "1", "2") == b"2" and store.compare_set("a", "1", "3") == b"2"
    assert store.num_keys() == 2 and store.delete_key("a") and not store.delete_key("a")
    with pytest.raises(Exception, match=r"no value of missing within 0\.2 s"):
        store.wait(["missing"], timedelta(seconds=0.2))
    threading.Timer(0.3, lambda: NetworkStore(Client(server.address, SECRET, 5.0), 5.0).set("late", b"\0x")).start()
    assert store.get("late") == b"\0x"


def test_it_listens_on_one_address_only(server):
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    port = f"{server.address[1]:04X}"
    assert [address for address in listening if address.endswith(port)] == [f"0100007F:{port}"]


def test_without_the_secret_nothing_is_said(server):
    with pytest.raises(RefusedError):
        Client(server.address, b"x" * 32, 2.0).call(b"count")
    Client(server.address, SECRET, 2.0).call(b"set", b"key", b"private")
    with socket.create_connection(server.address, timeout=2.0) as sock:
        greeting = receive(sock)
        send(sock, [b"get", b"key"])  # no greeting of ours, only the question
        with pytest.raises(OSError):
            assert b"private" not in b"".join(receive(sock))
            receive(sock)
    assert len(greeting) == 1 and b"private" not in greeting[0]


def test_a_server_cannot_be_played_back_at_itself(server):
    """A client that knows nothing and answers with what it was sent."""
    with socket.create_connection(server.address, timeout=2.0) as sock:
        send(sock, receive(sock))
        with pytest.raises(OSError):
            send(sock, receive(sock))
            receive(sock)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["silent", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_stranger_who_says_nothing_does_not_keep_others_out(way):
    if shutil.which("ip") is None or subprocess.run(["unshare", "-rn", "true"], check=False).returncode:
        pytest.skip("no network namespace of the test's own here")
    line = 'ip link set lo up && exec "$@"'
    command = ["unshare", "-rn", "sh", "-c", line, "sh", sys.executable, "-c", STRANGER, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr


def spec(index: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> LauncherSpec:
    return LauncherSpec(index, 2, 1, address, SECRET, timeout_s=4.0, start_s=8.0)


def two(configurations: tuple[str, str] = ("same", "same")) -> tuple[list[Rendezvous], list[str]]:
    """Two launchers that have joined, and what join gave or why it failed."""
    first = Rendezvous(spec(0))
    members = [first, Rendezvous(spec(1, first.address))]
    for member in members:
        member.watch_over(lambda: ENDED.append(1))
    results = ["", ""]

    def join(index: int) -> None:
        try:
            results[index] = members[index].join(configurations[index], f"/runs/{index}")
        except LaunchError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=join, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members, results


@pytest.fixture
def no_killing():
    ENDED.clear()
    return ENDED


def test_machine_0_decides_the_run_folder_and_ranks_are_numbered_across(no_killing):
    members, folders = two()
    assert folders == ["/runs/0", "/runs/0"]
    variables = members[1].variables()
    assert variables["VISSL_ZERO_FIRST_RANK"] == "1" and variables["VISSL_ZERO_WORLD_SIZE"] == "2"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo" == interface_towards("127.0.0.1", 1)
    for member in reversed(members):
        member.leave(0)
    assert no_killing == [] and [member.cause for member in members] == ["", ""]


def test_another_configuration_is_refused_on_both(no_killing):
    members, results = two(("a", "b"))
    assert all("started with another configuration" in text for text in results)
    for member in reversed(members):
        member.leave(0)


def test_who_does_not_come_and_who_cannot_be_reached_are_named():
    alone = Rendezvous(replace(spec(0), start_s=0.3))
    with pytest.raises(LaunchError, match="Machine 1 of 2 did not join"):
        alone.join("", "")
    alone.leave(0)
    with pytest.raises(LaunchError, match="Machine 0 cannot be reached"):
        Rendezvous(replace(spec(1, ("127.0.0.1", 1)), start_s=0.3)).join("", "")
    stranger = KeyValueServer(("127.0.0.1", 0), b"other" * 8)
    with pytest.raises(LaunchError, match="need the same secret"):
        Rendezvous(spec(1, stranger.address)).join("", "")
    stranger.close()
    with pytest.raises(LaunchError, match=r"Cannot listen on 192\.0\.2\.1:80"):
        Rendezvous(spec(0, ("192.0.2.1", 80)))


@pytest.mark.slow
def test_a_failure_on_one_machine_is_told_on_the_other(no_killing):
    members, _ = two()
    began = Failure(1, time.time_ns(), False, "RuntimeError: the cat sat on the keyboard")
    assert members[1].explain(began) == ""
    lost = Failure(0, time.time_ns(), False, "Connection closed by peer [127.0.0.1]:1")
    assert f"rank 1 on machine 1 ({socket.gethostname()}) failed first:\nRuntimeError: the cat" in members[0].explain(
        lost
    )
    for member in reversed(members):
        member.leave(0)


def joined(member: Rendezvous) -> tuple[threading.Thread, list[str]]:
    """Join beside this; what it gave, or why it failed, once the thread has ended."""
    found: list[str] = []

    def join() -> None:
        try:
            found.append(member.join("same", "/runs/again"))
        except LaunchError as error:
            found.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    return thread, found


@pytest.mark.slow
def test_all_restart_in_a_new_generation(no_killing):
    """So does a launcher that is there before the last generation's server has ended, and one that is a new process."""
    (first, second), _ = two()
    assert second.explain(Failure(1, 0, False, "rank 1 was ended by SIGKILL.")) == ""
    second.leave(None)
    again = [Rendezvous(spec(1, first.address), before=second)]
    early, found = joined(again[0])
    assert "rank 1 was ended by SIGKILL" in first.explain(
        Failure(0, time.time_ns(), False, "Connection closed by peer")
    )
    assert first.exit_code == 1 and first.may_start_again and early.is_alive()
    first.leave(None)
    again.insert(0, Rendezvous(replace(spec(0), address=first.address), before=first))
    assert again[0].join("same", "/runs/0") == "/runs/0"
    early.join()
    assert found == ["/runs/0"] and [member.num_restarts for member in again] == [1, 1]
    assert again[0].generation_name == again[1].generation_name != first.generation_name

    twice, refused = joined(Rendezvous(replace(spec(1, first.address), start_s=0.3)))
    twice.join()
    assert refused[0].startswith("Machine 1 takes part in this run already.")
    again[1]._stopping.set()  # as if its process had ended
    newcomer = Rendezvous(spec(1, first.address))
    late, found = joined(newcomer)
    assert (
        again[0].explain(Failure(0, time.time_ns(), False, "Connection closed by peer")).startswith("Lost machine 1 ")
    )
    assert late.is_alive() and again[0].may_start_again
    again[0].leave(None)
    third = Rendezvous(replace(spec(0), address=first.address), before=again[0])
    assert third.join("same", "/runs/0") == "/runs/0"
    late.join()
    assert found == ["/runs/0"] and newcomer.num_restarts == third.num_restarts == 2
    for member in (newcomer, third):
        member.leave(0)


def test_nobody_starts_again_after_a_users_error_or_a_stop(no_killing):
    members, _ = two()
    members[1].explain(Failure(1, 0, True, "config.X: must be Y"))
    assert "config.X: must be Y" in members[0].explain(Failure(0, time.time_ns(), False, "Connection closed by peer"))
    assert members[0].exit_code == 2
    for member in reversed(members):
        member.leave(2)
    members, _ = two()
    members[1].leave(130)
    assert "has ended with exit code 130" in members[0].explain(Failure(0, 0, False, "rank 0 was ended by SIGKILL."))
    assert members[0].exit_code == 130 and not members[0].may_start_again
    members[0].leave(130)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_machine_is_lost_by_name(silent, no_killing):
    members, _ = two()
    quiet, other = members[silent], members[1 - silent]
    quiet._stopping.set()
    if quiet._server is not None:
        quiet._server.close()
    lost = Failure(1 - silent, time.time_ns(), False, "Timed out waiting 4000ms for recv operation to complete")
    began = time.monotonic()
    assert other.explain(lost).startswith(f"Lost machine {silent} ")
    assert time.monotonic() - began < spec(0).timeout_s + 3 and no_killing == [1]
    other.leave(0)


def test_the_secret_file_is_made_private_and_refused_when_open(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = load_secret(None)
    path = tmp_path / ".vissl_zero/secret"
    assert len(made) == 32 and load_secret(None) == made == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"private\. Run chmod 600"):
        load_secret(None)
    with pytest.raises(LaunchError, match="cannot read"):
        load_secret(str(tmp_path / "none"))
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(LaunchError, match="at least 16 bytes"):
        load_secret(str(tmp_path / "short"))
