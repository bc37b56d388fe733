"""Terminal output that may be lost: a full disk, a reader that has gone or a closed terminal must not end a run.

What is printed holds no value that a configuration took from the environment (``errors.masked``). Imports nothing of
this package but the errors: the command line takes it before anything else.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from vissl_zero.errors import masked
from vissl_zero.terminal import print_line

_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EPIPE, errno.ENXIO}


class LossyStream:
    """A text stream that drops what cannot be written, and is the stream it wraps in all else.

    Attributes:
        dropped: why something was dropped that its reader still waits for; None if nothing was.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.dropped: OSError | None = None

    def write(self, text: str) -> int:
        """Write what there is, or drop it; returns the length of ``text``."""
        try:
            self._stream.write(masked(text))
        except OSError as error:
            self._drop(error)
        except UnicodeEncodeError:
            # A locale that lacks a letter of a folder's name must not end a run.
            encoding = self._stream.encoding or "ascii"
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno not in _LOST:
            raise error
        if error.errno == errno.EPIPE:
            # The reader is gone for good. The buffer must be flushed somewhere, or Python complains at exit.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        else:
            self.dropped = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class optional_output:  # noqa: N801 - used as a context, as contextlib's are
    """A context of work on a file that a run can do without: whatever fails in it is a warning.

    Not only ``OSError``: a library that draws or writes may pass a disk's failure on as anything.

    Args:
        name: name of the file.
        console: rich's, to print the warning on.
    """

    def __init__(self, name: str, console: Any):
        self._name, self._console = name, console

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        text = f"warning: {self._name} cannot be written ({why}); the run goes on without it."
        print_line(text, self._console)
        return True


def why_stdout_is_incomplete() -> OSError | None:
    """Return why what this process has printed is incomplete; None if it is not, or if its reader has gone away."""
    sys.stdout.flush()
    return sys.stdout.dropped if isinstance(sys.stdout, LossyStream) else None


def tolerate_lost_output() -> None:
    """Wrap stdout and stderr of this process, once; open those that were closed before it began."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file that is opened gets this number, and what a library prints goes into a checkpoint.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if number == 0 or isinstance(stream, LossyStream):
            continue
        if stream is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
        setattr(sys, name, LossyStream(stream))
