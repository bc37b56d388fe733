"""How a rank that fails tells the others' parent why: one JSON file a rank, in the format torchrun reads too.

torch's own record has whole seconds only, which cannot tell the rank that failed from those that lost their peer a
moment later; ours adds nanoseconds.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from vissl_zero.errors import VisslZeroError

FAILURE_FOLDER_VARIABLE = "VISSL_ZERO_FAILURES"


@dataclass(frozen=True)
class Failure:
    """Why one rank ended.

    Attributes:
        rank: global rank.
        time_ns: when, on this machine's clock.
        is_user_error: the text is a sentence for the user, not a traceback.
        text: sentence or traceback.
    """

    rank: int
    time_ns: int
    is_user_error: bool
    text: str


def write_failure(error: BaseException, rank: int) -> Failure:
    """Record why this rank is about to exit, for the launcher (ours or torchrun), if one is listening."""
    is_user_error = isinstance(error, VisslZeroError)
    text = str(error) if is_user_error else "".join(traceback.format_exception(error)).rstrip()
    failure = Failure(rank, time.time_ns(), is_user_error, text)
    if folder := os.environ.get(FAILURE_FOLDER_VARIABLE):
        path = Path(folder) / f"rank{rank}.json"
        path.write_text(json.dumps(failure.__dict__))
    elif path_name := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": text, "timestamp": str(failure.time_ns // 10**9)}
        message = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": info}}
        Path(path_name).write_text(json.dumps(message))
    return failure


def first_failure(folder: Path, exit_codes: dict[int, int]) -> Failure:
    """The failure that took the run down: a rank killed by a signal that is not the launcher's own, else the earliest.

    Args:
        folder: where ranks wrote their failures.
        exit_codes: of the ranks that ended badly, as ``Popen.returncode`` gives them (negative: a signal).
    """
    reports = [Failure(**json.loads(path.read_text())) for path in sorted(folder.glob("rank*.json"))]
    reported = {report.rank for report in reports}
    for rank, code in sorted(exit_codes.items()):
        if rank not in reported and code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = " (often the kernel, out of memory)" if -code == signal.SIGKILL else ""
            return Failure(rank, 0, False, f"rank {rank} was ended by {name}{hint}.")
    if reports:
        return min(reports, key=lambda report: report.time_ns)
    rank, code = min(exit_codes.items(), default=(0, 1))
    return Failure(rank, 0, False, f"rank {rank} ended with exit code {code} and left no traceback.")
