"""The secret that machines of a run prove to each other that they know: 32 random bytes in a file of the user's."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from vissl_zero.errors import LaunchError

DEFAULT = "~/.vissl_zero/secret"
_NUM_BYTES = 32


def load_secret(path_name: str | None) -> bytes:
    """The secret in a file, which is made first if it is the default one and missing.

    Raises:
        LaunchError: it is missing, empty, or can be read by others.
    """
    path = Path(path_name or DEFAULT).expanduser()
    if path_name is None and not path.exists():
        return _made(path)
    try:
        with path.open("rb") as file:
            # Of the open file: a path may name another file by the time that it is read.
            status = os.fstat(file.fileno())
            content = file.read(4096)
    except OSError as error:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: cannot read {path} ({error.strerror}).") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            f"config.DISTRIBUTED.SECRET_FILE: {path} must belong to you and be private. Run chmod 600 on it."
        )
    if len(content) < 16:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: {path} must hold at least 16 bytes. Delete it to make one.")
    return content


def _made(path: Path) -> bytes:
    content = secrets.token_bytes(_NUM_BYTES)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # a launcher beside this one was faster
        return load_secret(str(path))
    except OSError as error:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: cannot make {path} ({error.strerror}).") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return content
