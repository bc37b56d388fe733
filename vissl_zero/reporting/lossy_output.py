"""Terminal output that may be lost: a full disk, a closed pipe or a closed terminal must not end a run.

Values that a configuration took from the environment are never printed (``errors.masked``). This imports only the
errors of this package, because the command line imports it before anything else.
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

# A disk that is full or gone, a pipe without a reader, a terminal that has hung up.
_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EPIPE, errno.ENXIO}


class LossyStream:
    """A text stream that drops output if it cannot be written; all else is passed to the wrapped stream.

    Attributes:
        dropped: error of lost output whose reader still exists; None if no such output was lost.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.dropped: OSError | None = None

    def write(self, text: str) -> int:
        """Write or drop ``text`` and return its length."""
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
        """Flush or drop the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        # Other errors, such as a bad file descriptor, are faults of the program.
        if error.errno not in _LOST:
            raise error
        if error.errno == errno.EPIPE:
            # The reader is gone for good. The buffer must be flushed somewhere, else Python complains at exit.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        else:
            self.dropped = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class optional_output:  # noqa: N801 - used as a context, as contextlib's are
    """A context in which an optional file is written: any error in it becomes a warning.

    Not only ``OSError``: a library may raise another exception if a disk fails.

    Args:
        name: name of the file.
        console: rich console on which to print the warning.
    """

    def __init__(self, name: str, console: Any):
        self._name, self._console = name, console

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        # Ctrl-C and exits go through.
        if not isinstance(error, Exception):
            return False
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        text = f"warning: {self._name} cannot be written ({why}); the run goes on without it."
        print_line(text, self._console)
        return True


def why_stdout_is_incomplete() -> OSError | None:
    """Return the error by which this process's output is incomplete; None if it is complete or its reader is gone."""
    sys.stdout.flush()
    return sys.stdout.dropped if isinstance(sys.stdout, LossyStream) else None


def tolerate_lost_output() -> None:
    """Wrap stdout and stderr of this process once, each in a ``LossyStream``; reopen them if they are closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Else the next opened file gets this descriptor, and output of a library could go into a checkpoint.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if number == 0 or isinstance(stream, LossyStream):
            continue
        if stream is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - never closed
        setattr(sys, name, LossyStream(stream))
