"""Files on disk: written complete or not at all, and read only if they are regular files."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOCK_NAME = "run.lock"  # in the folder of every run
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISLNK, "a link"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISREG, ""))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a free path beside ``path`` to write to; rename it over ``path`` at the end, remove it after an error.

    The data reach the disk before the rename, so that a power cut leaves the old file or the new one. A link at
    ``path`` is replaced, never followed. Who may read the file is decided by the umask alone, whatever library writes
    it (safetensors would make it private).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # O_EXCL follows no link that stands under this name.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.close(fd)
        temporary.unlink()  # some libraries insist on making their file
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the first error says more
            temporary.unlink(missing_ok=True)


def is_there(path: str | Path) -> bool:
    """Check whether there is something at ``path``.

    Unlike ``Path.exists``, False for what no path can be (too long, a zero byte) and for what this user may not
    look at.
    """
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str | Path) -> bool:
    """Check whether there is a folder at ``path``; see ``is_there``."""
    return is_there(path) and Path(path).is_dir()


def is_file(path: str | Path) -> bool:
    """Check whether there is a file at ``path``; see ``is_there``."""
    return is_there(path) and Path(path).is_file()


def open_regular(path: str | Path, *, follow_links: bool = False) -> int:
    """Open ``path`` for reading and return its file descriptor. Never wait: a named pipe in place of a file is refused.

    Args:
        path: path of a file.
        follow_links: take what a link points to; for paths that the user names.
    Raises:
        OSError: missing, unreadable, or not a regular file; ``strerror`` says which.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink() and not follow_links:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    if kind := irregular(os.fstat(fd)):
        os.close(fd)
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return fd


def read_regular(path: str | Path, most_bytes: int, *, follow_links: bool = False) -> bytes:
    """Read the bytes of a regular file; see ``open_regular``.

    Raises:
        OSError: as ``open_regular``, or the file has more than ``most_bytes``.
    """
    with os.fdopen(open_regular(path, follow_links=follow_links), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
        return file.read()


def read_object(path: str | Path, most_bytes: int = 2**26) -> dict[str, Any]:
    """Read the JSON object that a regular file holds; see ``open_regular``.

    Raises:
        OSError: as ``read_regular``.
        ValueError: it is none.
    """
    return as_object(read_regular(path, most_bytes))


def as_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError where ``text`` is none."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def irregular(facts: os.stat_result) -> str:
    """Name what is not a regular file ("a folder", "a named pipe"); return "" for a regular file."""
    return next((name for test, name in _KINDS if test(facts.st_mode)), "a device or socket")
