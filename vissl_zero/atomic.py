"""Files that are whole or absent: whoever reads a folder while it is being written never sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A free path beside ``path`` to write to; renamed over ``path`` at the end, removed after an error.

    The data reach the disk before the rename, so that a power cut leaves the old file or the new one. Who may read the
    file is decided by the umask alone, whatever library writes it (safetensors would make it private).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        temporary.unlink()  # some libraries insist on making their file
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
