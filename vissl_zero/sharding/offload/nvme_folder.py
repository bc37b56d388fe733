"""A folder for this run and rank alone under the user's ``nvme_path``.

``<nvme_path>/vissl-zero-<random>/rank<k>/``: folders 0700, files 0600, created exclusively, links not followed. The
random part makes sure that neither another run nor what a crash left behind is ever taken for one's own; nothing in it
outlives the process by itself, so nothing there is ever read by a later run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError

PREFIX = "vissl-zero-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFolder:
    """This rank's folder, held open and locked for as long as the process lives.

    Args:
        nvme_path: an existing folder of the user's, on the disk to use.
        run_name: of this run, the same on every rank; see ``new_run_name``.
        rank: global.
        keep: leave the files at ``remove``.
    Raises:
        OffloadError: the folder is missing, a link, not a folder or not writable.
    """

    def __init__(self, nvme_path: str, run_name: str, rank: int, keep: bool = False):
        self._keep = keep
        self.path = Path(nvme_path) / run_name / f"rank{rank}"
        base = _open_base(nvme_path)
        try:
            self._run_name = run_name
            run = _enter_run(base, run_name, nvme_path)
            try:
                os.mkdir(self.path.name, 0o700, dir_fd=run)
                self.fd = os.open(self.path.name, _FOLDER, dir_fd=run)
            except OSError as error:
                raise _refused(str(self.path), error) from error
            finally:
                os.close(run)
        finally:
            os.close(base)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells a later run that this one is alive

    def remove(self) -> None:
        """Delete this rank's files and, with the last rank, the run's folder; nothing if they are to be kept."""
        if self._keep:
            os.close(self.fd)
            return
        # By the descriptor, not by the path, which somebody may have pointed to another folder.
        for name in _names(self.fd):
            os.unlink(name, dir_fd=self.fd)
        os.close(self.fd)
        # A folder that somebody has put something else into, or has removed, is left as it is.
        with suppress(OSError):
            self.path.rmdir()
            self.path.parent.rmdir()


def new_run_name() -> str:
    """A name that no other run has; the same on every rank. Collective."""
    return collectives.broadcast_object(f"{PREFIX}{secrets.token_hex(8)}")


def stale_runs(nvme_path: str) -> list[str]:
    """Names of folders that runs which are no longer alive have left under ``nvme_path``. Not a collective."""
    base = _open_base(nvme_path)
    try:
        return [name for name in sorted(_names(base)) if name.startswith(PREFIX) and _is_stale(base, name)]
    finally:
        os.close(base)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _is_stale(base: int, name: str) -> bool:
    """Whether there are ranks' folders below and none of them is locked by a living process."""
    try:
        run = os.open(name, _FOLDER, dir_fd=base)
    except OSError:
        return False
    try:
        ranks = [entry for entry in _names(run) if entry.startswith("rank")]
        return bool(ranks) and not any(_is_locked(run, entry) for entry in ranks)
    finally:
        os.close(run)


def _is_locked(run: int, entry: str) -> bool:
    try:
        fd = os.open(entry, _FOLDER, dir_fd=run)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _open_base(nvme_path: str) -> int:
    try:
        return os.open(nvme_path, _FOLDER)
    except OSError as error:
        raise _refused(nvme_path, error) from error


def _enter_run(base: int, run_name: str, nvme_path: str) -> int:
    """Open the run's folder, made by whichever rank of this machine came first."""
    try:
        with suppress(FileExistsError):
            os.mkdir(run_name, 0o700, dir_fd=base)
        run = os.open(run_name, _FOLDER, dir_fd=base)
    except OSError as error:
        raise _refused(nvme_path, error) from error
    found = os.fstat(run)
    # Where others may write to nvme_path, one of them may have made a folder of this name first.
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(run)
        raise OffloadError(f"{nvme_path}/{run_name} is not a folder of this user alone. Use another nvme_path.")
    return run


def _refused(path: str, error: OSError) -> OffloadError:
    is_link = Path(path).is_symlink()
    reason = {
        errno.ENOENT: "does not exist",
        errno.ENOTDIR: "is a link" if is_link else "is not a folder",
        errno.ELOOP: "is a link",
        errno.EACCES: "is not writable by this user",
        errno.EPERM: "is not writable by this user",
        errno.EROFS: "is on a file system that is read only",
    }.get(error.errno or 0, f"cannot be used: {error.strerror}")
    fix = "Give the folder it points to" if is_link else "Give an existing folder of yours on a local disk"
    return OffloadError(f"nvme_path: {path} {reason}. {fix}.")


class OffloadError(VisslZeroError):
    """Offloaded state cannot be stored, or did not come back as it was stored; training must not continue with it."""
