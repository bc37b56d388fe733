"""A temporary folder goes with its owner, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vissl_zero.lifetime import Scratch, remove_abandoned

OWNER = """
import sys
from vissl_zero.lifetime import Scratch
scratch = Scratch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process with a temporary folder below ``short_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    environment = {**os.environ, "TMPDIR": str(short_path)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def folder_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def cleanup_processes(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"vissl-zero-cleanup\0{folder}" in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def cleanup_process(folder: Path) -> int:
    """Wait until the cleanup process is seen in /proc, and return its number."""
    wait_until(lambda: len(cleanup_processes(folder)) == 1)
    return cleanup_processes(folder)[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_folder_of_a_killed_owner_is_removed(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner)
    assert folder.is_dir()
    owner.kill()
    wait_until(lambda: not folder.exists())


def test_a_killed_cleanup_process_is_replaced(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner)
    first = cleanup_process(folder)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(set(cleanup_processes(folder)) - {first}))
    owner.kill()
    wait_until(lambda: not folder.exists() and not cleanup_processes(folder))


def test_the_next_owner_removes_what_a_killed_owner_and_cleanup_process_left(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner)
    (folder / f"shares.{owner.pid}").touch()
    left = Path(f"/dev/shm/sem.loky-{owner.pid}-test")
    left.touch()
    process = cleanup_process(folder)
    os.kill(owner.pid, signal.SIGSTOP)  # so that it cannot replace its cleanup process
    os.kill(process, signal.SIGKILL)
    owner.kill()
    owner.wait()
    time.sleep(1.5)  # longer than a cleanup process would take
    assert folder.is_dir()
    with Scratch() as other:
        assert other.is_dir()
        assert not folder.exists()
    assert not left.exists()
    assert not other.exists()


def test_the_folder_of_a_living_owner_is_kept(owner: subprocess.Popen[str], short_path: Path) -> None:
    folder = folder_of(owner)
    (short_path / "vissl_zero_run_new").mkdir()  # made just now: its owner is about to lock it
    (short_path / "vissl_zero_run_link").symlink_to("/etc")
    remove_abandoned()
    assert folder.is_dir()
    assert (short_path / "vissl_zero_run_new").is_dir()
    assert (short_path / "vissl_zero_run_link").is_symlink()
    os.utime(short_path / "vissl_zero_run_new", (0.0, 0.0))
    remove_abandoned()
    assert not (short_path / "vissl_zero_run_new").exists()


def test_a_temporary_folder_has_room_for_the_names_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Scratch() as folder:
        assert folder.parent == Path("/tmp")
        assert len(os.fsencode(folder / "listener-12345678")) < 107
