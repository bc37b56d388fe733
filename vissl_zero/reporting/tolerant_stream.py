"""Terminal output that may be lost: a log on a full disk must not end a run."""

from __future__ import annotations

import errno
import sys
from typing import Any, TextIO

_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}


class TolerantStream:
    """A text stream that drops what its disk has no room for, and is the stream it wraps in all else."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in _LOST:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerate_full_disks() -> None:
    """Wrap stdout and stderr of this process, once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, TolerantStream):
            setattr(sys, name, TolerantStream(stream))
