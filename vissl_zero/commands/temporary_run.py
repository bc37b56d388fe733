"""A run in a temporary folder, in a process of its own, for commands that print what they found in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vissl_zero.config.override_words import as_word
from vissl_zero.lifetime import SWEEP_VARIABLE


def run_in(folder: Path, words: Sequence[str], is_quiet: bool = False) -> int:
    """Run a recipe in a folder that will not stay, and print its output on stderr. Return the exit code.

    Args:
        folder: run folder; lines that name it are left out, because a temporary path misleads.
        words: recipe and overrides.
        is_quiet: print nothing but notes and errors.
    """
    place = [f"config.CHECKPOINT.DIR={as_word(folder)}", f"hydra.run.dir={as_word(folder)}"]
    # A run like any other, with its checks and its ranks. As a process, its output can go to stderr: stdout has the
    # result alone.
    command = [sys.executable, "-m", "vissl_zero.cli", *words, *place]
    environment = {**os.environ, SWEEP_VARIABLE: str(os.getpid())}  # the run ends with this process in any case
    # Names of files need not be UTF-8, and the run prints them.
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=environment)
    notes = []
    with run, _ending_first(run):
        for line in run.stdout or ():
            if is_quiet and line.startswith("note: "):
                notes.append(line)
            elif not is_quiet and str(folder) not in line:
                print(line, end="", file=sys.stderr, flush=True)
    if not run.returncode:  # after an error, only the error is printed
        print(end="".join(notes), file=sys.stderr)
    return run.returncode


@contextmanager
def _ending_first(run: subprocess.Popen[str]) -> Iterator[None]:
    """Within this context, kill ``run`` before this process ends on a signal: an evaluation has nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        run.kill()  # its ranks end with their parent
        raise SystemExit(128 + number)

    # Python allows handlers in the main thread alone. Ctrl-C needs none: the terminal sends it to the run as well.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
