"""The folder of a run: prepared by one process, and locked for as long as the run lives.

A folder has one live run, and ``run.lock`` says whose it is. The lock is the operating system's (``flock``), which ends
with the process however that ends. Where a file system does not carry it from machine to machine, the file itself
tells: host, process, job and a time stamp renewed every 30 s.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vissl_zero.atomic import LOCK_NAME, irregular, replacing
from vissl_zero.errors import CheckpointError, LaunchError
from vissl_zero.resolve.resolve import save_resolved
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import as_data

_OUR_FILES = {
    "config.resolved.yaml",
    "config.user.yaml",
    "forecasts.jsonl",
    "metrics.jsonl",
    "report.png",
    LOCK_NAME,
    "summary.json",
    "weights.safetensors",
    "weights_ema.safetensors",
}
_OUR_FOLDERS = ("bad_steps", "features", "logs", "tensorboard")
_RENEW_S = 30.0
STALE_S = 300.0  # ten missed renewals
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def prepare_folder(plan: ResolvedRun, user_yaml: str) -> RunLock:
    """Make the run folder, lock it, write the user's and the resolved configuration into it. One process calls this.

    Returns:
        The lock, to be held as long as the run lives.
    Raises:
        LaunchError: another run is alive in the folder, it holds one that is not to be continued, or it cannot be
            written.
        ConfigError: the run there cannot go on with this configuration; its files stay as they are.
    """
    folder = Path(plan.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_plain_files(folder)
        lock = RunLock(folder)
        try:
            require_free(folder, plan)
            _require_resumable(
                folder, plan
            )  # before overwriting: the old configuration says how to read the weights here
            with replacing(folder / "config.user.yaml") as temporary:
                temporary.write_text(user_yaml, encoding="utf-8")
            save_resolved(plan, folder / "config.resolved.yaml")
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise LaunchError(
            f"config.CHECKPOINT.DIR: cannot write to {folder} ({error.strerror}). Name another folder."
        ) from error
    return lock


def require_plain_files(folder: Path) -> None:
    """Refuse links in the folder, which a run would write through, and folders where the run has a file.

    What stands inside ``checkpoints`` is left to the search for one to resume from, which passes over what is damaged.
    """
    for path in sorted(path for part in (folder, *map(folder.joinpath, _OUR_FOLDERS)) for path in _entries(part)):
        kind = irregular(path.lstat())
        if kind and (kind != "a folder" or path.name in _OUR_FILES):
            raise LaunchError(
                f"config.CHECKPOINT.DIR: {path} is {kind}, where a run writes its own files. Remove it, or name "
                "another folder."
            )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def require_free(folder: Path, plan: ResolvedRun) -> None:
    """Require that the folder holds no run, or one to continue: it has a checkpoint, or ended before its first."""
    if not (folder / "metrics.jsonl").exists():
        return
    has_checkpoint = any(folder.glob("checkpoints/step_*"))
    if plan.config.CHECKPOINT.AUTO_RESUME and (has_checkpoint or not (folder / "summary.json").exists()):
        return
    raise LaunchError(
        f"config.CHECKPOINT.DIR: {folder} already holds a run, and nothing there is overwritten. "
        "Name another folder, or move that one away."
    )


def _require_resumable(folder: Path, plan: ResolvedRun) -> None:
    """Refuse what the newest checkpoint in the folder cannot go on with. Imports torch, where there is one."""
    options = plan.config.CHECKPOINT
    is_newest = options.LATEST_CHECKPOINT_RESUME_FILE_NUM == 1
    if not (options.AUTO_RESUME and is_newest and any(folder.glob("checkpoints/step_*"))):
        return
    from vissl_zero.checkpoint.comparison import require_resumable
    from vissl_zero.checkpoint.folder import newest_checkpoint

    try:
        with newest_checkpoint(folder, []) as checkpoint:
            saved = checkpoint.manifest.config
    except CheckpointError:  # none opens: the run says why
        return
    require_resumable(saved, as_data(plan), options.ALLOW_CHANGED)


class RunLock:
    """Held from ``__init__`` to ``release``, or to the end of the process; one process per run takes it.

    A lock whose owner is gone is taken over without a word: its process on this machine has ended, it belongs to an
    earlier try of this very job (a requeue), or it was not renewed for ``STALE_S`` seconds.

    Args:
        folder: the run folder; exists.
    Raises:
        LaunchError: another run is alive in the folder; it is named.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Before the lock is tried, so that a refusal can name the owner.
            owner = _read(self._fd)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refused(folder, owner) from None
            except OSError:
                pass  # a file system without locks: the file decides
            if owner and not _is_gone(owner, self._fd):
                raise _refused(folder, owner)
            self._write({"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid()), "job": _job()})
        except BaseException:
            os.close(self._fd)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others have the folder. The file stays, empty: removing it could remove the next owner's."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _write(self, facts: dict[str, Any]) -> None:
        text = json.dumps(facts).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            with suppress(OSError):  # a full disk must not end the run
                os.utime(self._fd)


def owner_of(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return what ``run.lock`` says of its owner (empty after a run that ended by itself), and whether it is alive."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}, False
    try:
        owner = _read(fd)
        return owner, bool(owner) and owner.get("pid") != os.getpid() and not _is_gone(owner, fd)
    finally:
        os.close(fd)


def _job() -> str:
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")


def _born(pid: int) -> str:
    """Return when a process of this machine started, in its own clock: a number may go to another process later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _read(fd: int) -> dict[str, Any]:
    try:
        facts = json.loads(os.pread(fd, 10_000, 0))
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_gone(owner: dict[str, Any], fd: int) -> bool:
    if owner.get("host") == socket.gethostname():
        pid = owner.get("pid")
        return not isinstance(pid, int) or pid == os.getpid() or not _born(pid) or _born(pid) != owner.get("born")
    if owner.get("job") and owner.get("job") == _job():
        return True
    renewed = os.fstat(fd).st_mtime
    return time.time() - renewed > STALE_S


def _refused(folder: Path, owner: dict[str, Any]) -> LaunchError:
    job = f", job {owner['job']}" if owner.get("job") else ""
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown machine')}{job}"
    return LaunchError(
        f"config.CHECKPOINT.DIR: a run is active in {folder} ({who}). "
        "Name another folder, or end that run first; it can be resumed in the same folder."
    )
