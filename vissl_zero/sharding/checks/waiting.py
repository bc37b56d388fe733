"""Names the call in which this rank waits for others, within seconds instead of at the time limit.

A collective that only some ranks call (``if rank == 0: evaluate()``) waits until its timeout, and its error names
neither the call nor the cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError

AFTER_S = 5.0
_POLL_S = 0.5
_LOST = ("Timed out", "Connection closed", "Connection reset", "Broken pipe", "timeout", "Socket", "has ended")


class _Watch:
    """A thread that checks twice a second whether the outermost call is overdue."""

    def __init__(self) -> None:
        self.is_on = False
        self.call = ""  # empty: none is running
        self.since = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread: once per process; after a fork, once more."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._poll, name="vissl_zero waiting", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        reported = 0.0
        while True:
            time.sleep(_POLL_S)
            # Read once: the main thread may change both at any time.
            call, since = self.call, self.since
            if call and since != reported and time.monotonic() - since > AFTER_S:
                reported = since
                where = f"Rank {collectives.rank()} waits in {call} for more than {AFTER_S:.0f} s"
                # A warning, no error: a first backward pass may compile for minutes.
                why = "this rank compiles or computes, or another rank has not made the call"
                logging.getLogger(__name__).warning("%s: %s. %s", where, why, _FIX)


_watch = _Watch()


def watch_calls() -> None:
    """Watch calls in this process from now on. For loops of users, which may leave a rank waiting."""
    _watch.is_on = True


@contextmanager
def waiting(call: str) -> Iterator[None]:
    """Watch a call that every rank must make. A context. Cost: some microseconds.

    Args:
        call: the call as written in the loop, for messages.
    Raises:
        VisslZeroError: other ranks did not take part within the time limit, or have ended.
    """
    # An outer call is watched already: its name says more than that of a collective inside.
    if not _watch.is_on or _watch.call or collectives.world_size() == 1:
        yield
        return
    _watch.start()
    # Time before name: the thread would otherwise combine this call with the time of the last one.
    _watch.since, _watch.call = time.monotonic(), call
    try:
        yield
    except (RuntimeError, OSError) as error:
        # A timeout of the process group or the end of another rank, in the words of gloo, nccl or the communicator.
        if isinstance(error, VisslZeroError) or not any(word in str(error) for word in _LOST):
            raise
        raise VisslZeroError(
            f"Rank {collectives.rank()} waits in {call}: another rank has not called it. {_FIX}"
        ) from error
    finally:
        _watch.call = ""


_FIX = (
    "Every rank must call it, in the same order. If it stands under if rank == 0: ..., call it on all ranks, and use "
    "the result on one. In a loop, give every rank the same number of batches."
)
