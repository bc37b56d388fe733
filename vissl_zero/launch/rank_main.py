"""Entry of a rank that ``RankGroup`` started: listens to signals before anything slow is imported."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from vissl_zero.engine import stopping

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Train as one rank; see ``worker.main``."""
    _end_with_the_launcher()
    stopping.listen(ctrl_c=False)
    # Ctrl-C reaches every process of the terminal, and the launcher passes it on as well: twice means once here.
    signal.signal(signal.SIGINT, _on_ctrl_c)
    from vissl_zero.launch import worker

    return worker.main()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    stopping.ask("Ctrl-C", stopping.INTERRUPTED)


def _end_with_the_launcher() -> None:
    """Have the kernel kill this process when its launcher dies: nobody else would end it, and the lock is gone then."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get("VISSL_ZERO_LAUNCHER", str(os.getppid())):
        os._exit(1)  # it died before we asked


if __name__ == "__main__":
    # os._exit: a failed rank must not wait for threads of a process group whose peers are gone. One that is done has
    # closed its files and left the group; taking down the interpreter under what is left of gloo's threads can only
    # spoil that (seen once in a finished run on two machines: SIGABRT).
    code = main()
    for child in multiprocessing.active_children():  # workers that load data
        child.terminate()
    with suppress(OSError):  # a full disk
        sys.__stdout__.flush()  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
    os._exit(code)
