"""Save and stop: how to ask a run to end early, and the exit codes that report it.

After a request on any rank, the run finishes its optimizer step and one more, in which all ranks receive the request.
Then it saves, closes its files, and ends with exit code ``STOPPED`` (75) instead of 0. The same command resumes it, on
any number of ranks. Ctrl-C does the same and ends with ``INTERRUPTED`` (130). Launchers (the local one, a batch system)
need only this file::

    from vissl_zero.engine import stopping

    stopping.listen()           # in a rank's process: save and stop on SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, Ctrl-C
    stopping.request_stop("preempted")   # the same without a signal; from any thread, or from a signal handler
    stopping.end_at(deadline)   # the time limit, as Unix time; VISSL_ZERO_END_AT in the environment does it too
    ...
    if code == stopping.STOPPED:  # the exit code of a rank, of the launcher, of ``vissl-zero config=...``
        requeue()

A batch system may send its warning signal (``#SBATCH --signal=USR1@300``) to the ranks or to the launcher, which
forwards it. SIGHUP (the terminal was closed) stays ignored under nohup. A second Ctrl-C ends at once, without saving.

Other exit codes: 0 success, 1 a crash, 2 wrong input. A sweep records the exit code of each job in ``job.json`` in the
job's folder. Imports no torch.
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
    """A request to end a run.

    Attributes:
        reason: reason to print ("SIGUSR1", "the time limit", ...).
        exit_code: ``STOPPED``, or ``INTERRUPTED`` for Ctrl-C.
    """

    reason: str
    exit_code: int = STOPPED


_requested: Stop | None = None
_end_at: float | None = None


def request_stop(reason: str, exit_code: int = STOPPED) -> None:
    """Request that the run save and stop after the next step. If called several times, the first request counts."""
    global _requested
    if _requested is None:
        _requested = Stop(reason, exit_code)


def requested_stop() -> Stop | None:
    """Return the request of this rank, or one for the time limit if that has passed; None: continue."""
    if _requested is not None:
        return _requested
    limit = deadline()
    if limit is not None and time.time() >= limit:
        return Stop("the time limit")
    return None


def end_at(unix_time_s: float | None) -> None:
    """Set the time limit, Unix time (s). ``VISSL_ZERO_END_AT`` counts if it is earlier. None: no limit of its own."""
    global _end_at
    limits = [limit for limit in (unix_time_s, _from_environment()) if limit is not None]
    _end_at = min(limits, default=None)


def deadline() -> float | None:
    """Return the time limit, Unix time (s); None: no limit."""
    return _end_at if _end_at is not None else _from_environment()


def forget() -> None:
    """Clear all requests and the time limit, before the next run in this process."""
    global _requested, _end_at
    _requested = _end_at = None


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return ``SIGNALS``, without SIGHUP if nohup ignores it."""
    return tuple(s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN)


def listen(ctrl_c: bool = True) -> None:
    """Install handlers that save and stop on ``SIGNALS`` (and Ctrl-C). Does nothing outside the main thread."""
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return
    for number in handled_signals():
        signal.signal(number, _on_signal)
    if ctrl_c:
        signal.signal(signal.SIGINT, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    # Only a note is taken here: a handler runs between any two lines, also inside a collective that other ranks wait
    # for.
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
        overrides: Hydra's overrides of the job.
        code: exit code; None while the job runs, or if it was interrupted.
    """

    overrides: list[str]
    code: int | None = None

    def write(self, folder: Path) -> None:
        """Replace the note in the job's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE_NAME) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_note(folder: Path) -> JobNote | None:
    """Return the note in a job's folder; None if there is no readable note."""
    try:
        note = JobNote(**read_object(folder / FILE_NAME))
    except (OSError, ValueError, TypeError):
        return None
    is_list = isinstance(note.overrides, list) and all(isinstance(word, str) for word in note.overrides)
    return note if is_list and (note.code is None or type(note.code) is int) else None


def read_jobs(sweep_dir: Path) -> dict[Path, JobNote]:
    """Return the notes of a sweep's jobs by the job's folder, in the order of the jobs."""
    folders = [path for path in sweep_dir.iterdir() if path.is_dir()] if sweep_dir.is_dir() else []
    # By number, so that job 10 follows job 9. Folders that are no job's come last.
    folders.sort(key=lambda path: (int(path.name) if path.name.isdecimal() else 10**9, path.name))
    return {path: note for path in folders if (note := read_note(path)) is not None}


def read_summary(folder: Path) -> dict[str, Any]:
    """Return ``summary.json`` of a job; empty if the job has not written it."""
    try:
        return read_object(folder / "summary.json")
    except (OSError, ValueError):
        return {}


def is_done(folder: Path) -> bool:
    """Check whether a job ended with exit code 0 and a summary."""
    note = read_note(folder)
    return note is not None and note.code == 0 and bool(read_summary(folder))
