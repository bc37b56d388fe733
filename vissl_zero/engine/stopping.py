"""Save and stop: how to ask a run to end early, and the exit codes that report it.

A run that is asked to stop finishes its optimizer step and the next, in which all ranks learn of it, saves, closes
its files and ends with exit code ``STOPPED`` (75) instead of 0: the same command resumes from there, on the same number
of ranks or another. Asking one rank is enough. Ctrl-C does the same and ends with ``INTERRUPTED`` (130). Launchers
(the local one, a batch system) need only this file::

    from vissl_zero.engine import stopping

    stopping.listen()           # in a rank's process: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, Ctrl-C: save and stop
    stopping.request_stop("preempted")   # the same without a signal; from any thread, or from a signal handler
    stopping.end_at(deadline)   # the time limit, as Unix time; VISSL_ZERO_END_AT in the environment does it too
    ...
    if code == stopping.STOPPED:  # the exit code of a rank, of the launcher, of ``vissl-zero config=...``
        requeue()

A batch system that sends a warning signal before the end of a job (``#SBATCH --signal=USR1@300``) may send it to the
launcher or to the ranks: the launcher passes them on. SIGHUP (the terminal was closed) stays ignored under nohup. A
second Ctrl-C ends at once, unsaved.

Other exit codes: 0 done, 1 a crash, 2 the user's input. A sweep records the exit code of each job in ``job.json`` in
the job's folder. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from vissl_zero.atomic import read_object, replacing

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "temporary failure, the user is invited to retry"
INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
END_AT_VARIABLE = "VISSL_ZERO_END_AT"


@dataclass(frozen=True)
class Stop:
    """Why a run is to end.

    Attributes:
        reason: reason for people ("SIGUSR1", "the time limit", ...).
        exit_code: ``STOPPED``, or ``INTERRUPTED`` for Ctrl-C.
    """

    reason: str
    exit_code: int = STOPPED


_requested: Stop | None = None
_end_at: float | None = None


def request_stop(reason: str, exit_code: int = STOPPED) -> None:
    """Have this rank's run save and stop after the step that follows the one in progress. The first call counts."""
    global _requested
    if _requested is None:
        _requested = Stop(reason, exit_code)


def requested_stop() -> Stop | None:
    """Return the request that this rank got, or the time limit once it is reached; None: continue."""
    if _requested is not None:
        return _requested
    limit = deadline()
    if limit is not None and time.time() >= limit:
        return Stop("the time limit")
    return None


def end_at(unix_time_s: float | None) -> None:
    """Stop when the clock says so; the earlier of this and ``VISSL_ZERO_END_AT`` counts. None: no limit."""
    global _end_at
    limits = [limit for limit in (unix_time_s, _from_environment()) if limit is not None]
    _end_at = min(limits, default=None)


def deadline() -> float | None:
    """Return when the time limit is reached, as Unix time; None: no limit."""
    return _end_at if _end_at is not None else _from_environment()


def forget() -> None:
    """Forget all requests, for the next run of a process."""
    global _requested, _end_at
    _requested = _end_at = None


def handled_signals() -> tuple[signal.Signals, ...]:
    """``SIGNALS``, without SIGHUP if nohup ignores it."""
    return tuple(s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN)


def listen(ctrl_c: bool = True) -> None:
    """Let ``SIGNALS`` (and Ctrl-C, if wanted) mean save and stop. Only in the main thread; does nothing elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in handled_signals():
        signal.signal(number, _on_signal)
    if ctrl_c:
        signal.signal(signal.SIGINT, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        if _requested is not None:
            raise KeyboardInterrupt
        request_stop("Ctrl-C", INTERRUPTED)
    else:
        request_stop(signal.Signals(number).name)


def _from_environment() -> float | None:
    try:
        return float(os.environ[END_AT_VARIABLE])
    except (KeyError, ValueError):
        return None


FILE_NAME = "job.json"


@dataclass(frozen=True)
class JobNote:
    """One job of a sweep.

    Attributes:
        overrides: overrides as Hydra gave them to the job.
        code: exit code; None while it runs, or where it was interrupted.
    """

    overrides: list[str]
    code: int | None = None

    def write(self, folder: Path) -> None:
        """Replace the note in the job's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE_NAME) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_note(folder: Path) -> JobNote | None:
    """Read the note in a job's folder; return None if there is none that can be read."""
    try:
        note = JobNote(**read_object(folder / FILE_NAME))
    except (OSError, ValueError, TypeError):
        return None
    is_list = isinstance(note.overrides, list) and all(isinstance(word, str) for word in note.overrides)
    return note if is_list and (note.code is None or type(note.code) is int) else None


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a job, empty if it did not get that far."""
    try:
        return read_object(folder / "summary.json")
    except (OSError, ValueError):
        return {}


def is_done(folder: Path) -> bool:
    """Check whether a job ended properly."""
    note = read_note(folder)
    return note is not None and note.code == 0 and bool(read_summary(folder))
