"""The folder of a run: one process prepares it, and it is locked while the run is alive.

A folder has at most one live run, whose owner is in ``run.lock``. The operating system's lock (``flock``) ends with the
process in any case. Some file systems do not share locks between machines. There the content of the file decides: host,
process, job, and a time stamp that is renewed every 30 s.
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
    """Make and lock the run folder, and write both configurations into it. One process of the run calls this.

    Returns:
        The lock; hold it as long as the run is alive.
    Raises:
        LaunchError: another run is alive in the folder, the folder has a run that may not be continued, or it is not
            writable.
        ConfigError: the run there cannot continue with this configuration; its files are unchanged.
    """
    folder = Path(plan.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_plain_files(folder)
        lock = RunLock(folder)
        try:
            require_free(folder, plan)
            _require_resumable(folder, plan)  # before the old configuration, which describes the weights, is replaced
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
    """Refuse links in the folder, which a run would follow as it writes, and folders in the place of its files.

    Contents of ``checkpoints`` are not checked: the search for a checkpoint to resume from skips damaged ones.
    """
    for path in sorted(path for part in (folder, *map(folder.joinpath, _OUR_FOLDERS)) for path in _entries(part)):
        kind = irregular(path.lstat())
        if kind and (kind != "a folder" or path.name in _OUR_FILES):
            raise LaunchError(
                f"config.CHECKPOINT.DIR: {path} is {kind}, and a run could write through it. Remove it, or name "
                "another folder."
            )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def require_free(folder: Path, plan: ResolvedRun) -> None:
    """Require that the folder has no run, or a run to continue: with a checkpoint, or without a summary."""
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
    """Refuse a configuration with which the newest checkpoint cannot continue. Imports torch if there is one."""
    options = plan.config.CHECKPOINT
    is_newest = options.LATEST_CHECKPOINT_RESUME_FILE_NUM == 1
    if not (options.AUTO_RESUME and is_newest and any(folder.glob("checkpoints/step_*"))):
        return
    from vissl_zero.checkpoint.comparison import require_resumable
    from vissl_zero.checkpoint.folder import newest_checkpoint

    try:
        with newest_checkpoint(folder, []) as checkpoint:
            saved = checkpoint.manifest.config
    except CheckpointError:  # none can be opened; the run will report why
        return
    require_resumable(saved, as_data(plan), options.ALLOW_CHANGED)


class RunLock:
    """The lock of a run folder, from ``__init__`` to ``release`` or the end of the process. One process per run has it.

    A lock is taken over silently if its owner is gone: the owner's process on this machine has ended, the owner was an
    earlier attempt of the same job (a requeue), or the lock was not renewed for ``STALE_S`` seconds.

    Args:
        folder: an existing run folder.
    Raises:
        LaunchError: another run is alive in the folder; the message names it.
        OSError: the folder is not writable.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Read before locking, so that a refusal can name the owner.
            owner = _read(self._fd)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refused(folder, owner) from None
            except OSError:
                pass  # a file system without locks: the content of the file decides
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
        """Release the folder. The file remains, empty: its removal could remove the next owner's file."""
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
    """Return the owner's entries in ``run.lock`` (empty if the run released it), and whether the owner is alive."""
    try:
        # A link could lead anywhere, and the opening of a pipe would wait for a writer.
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
    """Return the start time of a process in kernel ticks, because process ids are reused."""
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
    # A requeued job may begin again on another machine; its earlier attempt has ended.
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
