"""Entry of a rank that ``RankGroup`` started: listens to signals before anything slow is imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from types import FrameType

from vissl_zero.engine import stopping
from vissl_zero.lifetime import end_with_parent
from vissl_zero.reporting.lossy_output import tolerate_lost_output


def main() -> int:
    """Train as one rank; see ``worker.main``."""
    tolerate_lost_output()
    end_with_parent(int(os.environ["VISSL_ZERO_LAUNCHER"]))  # else it would outlive its launcher, which holds the lock
    stopping.listen(ctrl_c=False)
    # Ctrl-C reaches every process of the terminal, and the launcher passes it on as well: twice means once here.
    signal.signal(signal.SIGINT, _on_ctrl_c)
    from vissl_zero.launch import worker

    return worker.main()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    stopping.ask("Ctrl-C", stopping.INTERRUPTED)


if __name__ == "__main__":
    # os._exit: a failed rank must not wait for threads of a process group whose peers are gone. One that is done has
    # closed its files and left the group; taking down the interpreter under what is left of gloo's threads can only
    # spoil that (seen once in a finished run on two machines: SIGABRT).
    code = main()
    for child in multiprocessing.active_children():  # workers that load data
        child.kill()  # one that is stopped would not hear of SIGTERM
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
