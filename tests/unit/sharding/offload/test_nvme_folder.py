"""A folder for this run alone, and one sentence for every way in which there cannot be one."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vissl_zero
from tests.ranks import log_messages
from vissl_zero.sharding.offload.block_file import (
    PREFIX,
    OffloadError,
    OffloadFolder,
    new_run_name,
    remove_dead_attempts,
    stale_runs,
)


def test_only_this_user_may_enter(tmp_path):
    folder = OffloadFolder(str(tmp_path), "vissl-zero-1", rank=3)
    assert folder.path == tmp_path / "vissl-zero-1" / "rank3"
    for path in (folder.path, folder.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_run_share_a_folder_that_goes_with_the_last(tmp_path):
    first, second = (OffloadFolder(str(tmp_path), "vissl-zero-1", rank) for rank in (0, 1))
    first.remove()
    assert [path.name for path in (tmp_path / "vissl-zero-1").iterdir()] == ["rank1"]
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_never_meet(tmp_path):
    assert new_run_name() != new_run_name()
    OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)
    with pytest.raises(OffloadError, match="rank0 cannot be used: File exists"):
        OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)


def test_a_run_waits_for_another_that_looks_whether_it_lives(tmp_path, monkeypatch):
    make = os.mkdir

    def make_and_look(name: str, mode: int, dir_fd: int) -> None:
        make(name, mode, dir_fd=dir_fd)
        if name == "rank0":
            looking = os.open(name, os.O_RDONLY, dir_fd=dir_fd)
            fcntl.flock(looking, fcntl.LOCK_SH)
            Timer(0.2, os.close, (looking,)).start()

    monkeypatch.setattr(os, "mkdir", make_and_look)
    folder = OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)
    assert stale_runs(str(tmp_path)) == []
    folder.remove()


def test_a_folder_leaves_no_file_open(tmp_path):
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    for keep in (False, True):
        folder = OffloadFolder(str(tmp_path), new_run_name(), rank=0, keep=keep)
        assert num_open() == before + 1
        folder.remove()
        assert num_open() == before
        blocked = new_run_name()
        (tmp_path / blocked).mkdir(mode=0o700)
        (tmp_path / blocked / "rank0").touch()
        with pytest.raises(OffloadError):
            OffloadFolder(str(tmp_path), blocked, rank=0)
        assert num_open() == before
        stale_runs(str(tmp_path))
        remove_dead_attempts(str(tmp_path), "of_another")
        assert num_open() == before


def test_files_are_kept_on_request(tmp_path):
    folder = OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0, keep=True)
    (folder.path / "x").write_text("x")
    folder.remove()
    assert (folder.path / "x").exists()


def _attempt(path: str, run: str, keep: bool = False) -> str:
    """What a killed attempt of a run leaves: a folder that no process has locked."""
    name = new_run_name(run, keep)
    folder = OffloadFolder(path, name, rank=0, keep=True)
    (folder.path / "parameters").write_bytes(b"x" * 10_000)
    folder.remove()
    return name


def test_files_of_dead_attempts_of_this_run_alone_are_removed(tmp_path):
    path = str(tmp_path)
    dead, other, of_none = (_attempt(path, run) for run in ("runs/a", "runs/b", ""))
    kept = _attempt(path, "runs/a", keep=True)
    alive = OffloadFolder(path, new_run_name("runs/a"), rank=0)
    remove_dead_attempts(path, "")
    assert dead in {found.name for found in tmp_path.iterdir()}
    remove_dead_attempts(path, "runs/a")
    assert {found.name for found in tmp_path.iterdir()} == {other, of_none, kept, alive.path.parent.name}


def test_an_attempt_that_was_killed_before_it_had_a_folder_of_a_rank_is_removed(tmp_path):
    path = str(tmp_path)
    (tmp_path / new_run_name("runs/a")).mkdir(mode=0o700)
    other = tmp_path / new_run_name("runs/b")
    other.mkdir(mode=0o700)
    remove_dead_attempts(path, "runs/a")
    assert [*tmp_path.iterdir()] == [other] and stale_runs(path) == []


def test_a_link_among_the_files_of_a_dead_attempt_is_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo").write_text("x")
    (tmp_path / "disk").mkdir()
    dead = _attempt(str(tmp_path / "disk"), "runs/a")
    (tmp_path / "disk" / dead / "rank1").symlink_to(tmp_path / "mine")
    remove_dead_attempts(str(tmp_path / "disk"), "runs/a")
    assert (tmp_path / "mine" / "photo").exists() and not (tmp_path / "disk" / dead / "rank0").exists()


def test_the_message_of_a_small_disk_has_sizes_that_say_something(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=1, f_frsize=2**20))
    folder = OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)
    with pytest.raises(OffloadError, match=r"needs 3\.00 MiB and the disk has 1\.00 MiB left"):
        folder.file("parameters", [3 * 2**20], False)


def _missing(path: Path) -> str:
    return str(path / "missing")


def _file(path: Path) -> str:
    (path / "file").write_text("")
    return str(path / "file")


def _link(path: Path) -> str:
    (path / "real").mkdir()
    (path / "link").symlink_to(path / "real")
    return str(path / "link")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [(_missing, "does not exist"), (_file, "is not a folder"), (_link, "is a link. Give the folder it points to")],
)
def test_paths_that_cannot_be_used(make, sentence, tmp_path):
    with pytest.raises(OffloadError) as caught:
        OffloadFolder(make(tmp_path), "vissl-zero-1", rank=0)
    assert sentence in str(caught.value) and "nvme_path: " in str(caught.value)


def test_a_link_put_in_the_place_of_the_run_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "vissl-zero-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OffloadError):
        OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_run_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "vissl-zero-1").mkdir(mode=0o755)
    with pytest.raises(OffloadError, match="is not a folder of this user alone"):
        OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns in a forked process, which may drop its rights, take limits or be killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(work(*args)))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(30) else None
    except EOFError:
        answer = None
    process.join(30)
    return answer


def _as_nobody(path: str) -> str:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        OffloadFolder(path, "vissl-zero-1", rank=0)
    except OffloadError as error:
        return str(error)
    return ""


def test_a_folder_that_is_not_writable(tmp_path):
    ours = [parent for parent in tmp_path.parents if "pytest-" in str(parent)]  # never what lies above, such as /tmp
    for parent in (tmp_path, *ours):
        parent.chmod(0o755)
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o555)
    assert "theirs is not writable by this user" in in_child(_as_nobody, str(folder))


def _die_with_files(path: str) -> None:
    folder = OffloadFolder(path, f"{PREFIX}dead", rank=0)
    (folder.path / "optimizer.state").write_text("old")
    os.kill(os.getpid(), 9)


def test_what_a_killed_run_left_is_named_and_a_living_one_is_not(tmp_path):
    OffloadFolder(str(tmp_path), f"{PREFIX}alive", rank=0)
    in_child(_die_with_files, str(tmp_path))
    assert stale_runs(str(tmp_path)) == [f"{PREFIX}dead"]
    # The next run says so, and leaves them alone.
    with log_messages() as messages:
        _, optimizer = vissl_zero.initialize(
            torch.nn.Linear(2, 2),
            {"type": "SGD", "lr": 0.1, "momentum": 0.9},
            {"level": 1, "offload_optimizer_config": {"device": "nvme", "nvme_path": str(tmp_path)}},
        )
    optimizer.close()
    (message,) = [message for message in messages if "earlier runs" in message]
    assert message.startswith(f"{tmp_path} holds files of earlier runs") and f"{PREFIX}dead" in message
    assert (tmp_path / f"{PREFIX}dead" / "rank0" / "optimizer.state").exists()
