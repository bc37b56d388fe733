"""Reports of a failing rank to its launcher: one JSON file per rank.

torchrun's record has a resolution of one second, which cannot separate the rank that failed from those that lost their
peer a moment later, and no field that tells a launcher whether to restart. Our record has both.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_object, replacing
from vissl_zero.errors import OutOfMemoryError, ProcessLostError, VisslZeroError, masked
from vissl_zero.lifetime import signal_name

FAILURE_FOLDER_VARIABLE = "VISSL_ZERO_FAILURES"


@dataclass(frozen=True)
class Failure:
    """Why one rank ended.

    Attributes:
        rank: global rank.
        time_ns: time of the failure on this machine's clock; 0: the rank was killed, or left no record.
        is_user_error: whether ``text`` is a sentence for the user, not a traceback.
        text: sentence or traceback.
        is_out_of_memory: whether an allocation failed, or the kernel killed the rank or a loader worker to free memory.
        has_lost_to_kill: whether SIGKILL ended a process that the rank needs.
    """

    rank: int
    time_ns: int
    is_user_error: bool
    text: str
    is_out_of_memory: bool = False
    has_lost_to_kill: bool = False


def write_failure(error: BaseException, rank: int) -> Failure:
    """Record why this rank is about to exit, for its launcher (ours or torchrun), if it has one.

    If the record cannot be written (a full disk), the text goes to stderr.
    """
    is_user_error = isinstance(error, VisslZeroError)
    is_sentence = is_user_error or isinstance(error, ProcessLostError)
    text = str(error) if is_sentence else masked("".join(traceback.format_exception(error)).rstrip())
    was_killed = isinstance(error, ProcessLostError) and error.was_killed
    failure = Failure(rank, time.time_ns(), is_user_error, text, isinstance(error, OutOfMemoryError), was_killed)
    path, record = _record(error, failure)
    if path is not None:
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(record))
        except OSError as problem:
            print(f"[rank {rank}] {text}\n(not recorded in {path}: {problem.strerror})", file=sys.stderr, flush=True)
    return failure


def _record(error: BaseException, failure: Failure) -> tuple[Path | None, dict[str, Any]]:
    """Return the path of this rank's record (None without a launcher), and its content in the launcher's format."""
    if folder := os.environ.get(FAILURE_FOLDER_VARIABLE):
        return Path(folder) / f"rank{failure.rank}.json", failure.__dict__
    if path_name := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": failure.text, "timestamp": str(failure.time_ns // 10**9)}
        return Path(path_name), {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": info}}
    return None, {}


def first_failure(folder: Path, exit_codes: dict[int, int], is_short_of_memory: bool = False) -> Failure:
    """Return the failure that ended the run: that of a rank which a foreign signal killed, else the earliest.

    Args:
        folder: where ranks wrote their failures.
        exit_codes: exit codes of the ranks that failed, as in ``Popen.returncode`` (negative: a signal).
        is_short_of_memory: whether the kernel killed processes during the run to free memory.
    """
    reports = [report for path in sorted(folder.glob("rank*.json")) if (report := _read(path)) is not None]
    reported = {report.rank for report in reports}
    # A killed rank leaves no report, and reports of the others may say only that they lost a peer.
    for rank, code in sorted(exit_codes.items()):
        if rank not in reported and code < 0 and -code != signal.SIGTERM:
            is_killed = -code == signal.SIGKILL
            why = "by the kernel, out of memory" if is_short_of_memory else "often the kernel, out of memory"
            hint = f" ({why})" if is_killed else ""
            text = f"rank {rank} was ended by {signal_name(-code)}{hint}."
            return Failure(rank, 0, False, text, is_killed and is_short_of_memory)
    if reports:
        first = min(reports, key=lambda report: report.time_ns)
        if first.has_lost_to_kill and is_short_of_memory:
            return replace(first, is_out_of_memory=True)
        return first
    rank, code = min(exit_codes.items(), default=(0, 1))
    is_user_error = code == 2 and bool(exit_codes)  # the record could not be written, so the text was printed
    return Failure(rank, 0, is_user_error, f"rank {rank} ended with exit code {code} and left no record of why.")


def _read(path: Path) -> Failure | None:
    """Read a report; return None if it is damaged."""
    try:
        return Failure(**read_object(path))
    except (OSError, ValueError, TypeError):
        return None
