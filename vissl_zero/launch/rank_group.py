"""The group of a run's ranks on this machine: it starts and watches them, forwards signals, and ends them.

``torch.distributed.elastic`` is not used: the launcher would import torch before its ranks do, and a rank that saved
and stopped would count as failed (docs/cluster.md has the list). A rank runs this module: ``main`` sets the handlers
of signals before it imports anything slow.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from vissl_zero.engine import stopping
from vissl_zero.errors import LaunchError
from vissl_zero.imports import import_at_once
from vissl_zero.launch.failure import FAILURE_FOLDER_VARIABLE
from vissl_zero.launch.key_value_store import STORE_PATH_VARIABLE
from vissl_zero.launch.rendezvous import WORLD_SIZE_VARIABLE
from vissl_zero.lifetime import SCRATCH_VARIABLE, end_with_parent
from vissl_zero.reporting.lossy_output import tolerate_lost_output

_LAUNCHER_VARIABLE = "VISSL_ZERO_LAUNCHER"  # process id, so that a rank can tell that its launcher is gone
_POLL_S = 0.05
_OOM_SHARE = 100  # thousandths of the memory, added to a rank's own when the kernel picks a process to kill
_GRACE_S = 3.0  # after a rank failed, for the others to fail and to report why


class RankGroup:
    """``num_procs`` processes that run ``main``.

    Rank 0 keeps the terminal (the live display needs it); the others write to ``<log folder>/rank<k>.log``.

    Args:
        num_procs: number of processes to start.
        first_rank: global rank of the first process.
        plan_folder: folder with ``config.resolved.yaml``.
        private: folder that only this user can enter, for rendezvous, failure reports and temporary files of ranks.
        log_folder: folder of the ranks' output; it is made if it is missing.
        environment: environment of the ranks, in addition to the variables that this class sets.
        work: module of ``launch`` whose ``main`` the ranks run.
    """

    def __init__(
        self,
        num_procs: int,
        first_rank: int,
        plan_folder: str,
        private: Path,
        log_folder: Path,
        environment: dict[str, str],
        work: str = "worker",
    ):
        self.asked: stopping.Stop | None = None
        self.was_killed_by_user = False
        self._first_rank = first_rank
        self._ranks: list[subprocess.Popen[bytes]] = []
        if not log_folder.parent.is_dir() and Path(plan_folder) == log_folder.parent:
            raise LaunchError(f"{plan_folder} was moved or removed while the run wrote to it. Move it back.")
        log_folder.mkdir(parents=True, exist_ok=True)
        # With several machines, ``environment`` has the numbers and the store already (``Rendezvous.variables``).
        shared = {STORE_PATH_VARIABLE: str(private / "store")} if WORLD_SIZE_VARIABLE not in environment else {}
        # torch creates its compiler's folder on import, and leaves it in /tmp unless given another.
        shared |= {"TORCHINDUCTOR_CACHE_DIR": str(private / "inductor")} | environment
        # A rank ends without Python's own cleanup, because a cleanup process does that. Python's tracker of semaphores
        # would print a page of warnings.
        warnings = [os.environ.get("PYTHONWARNINGS", ""), "ignore::UserWarning:multiprocessing.resource_tracker"]
        shared |= {
            "PYTHONWARNINGS": ",".join(filter(None, warnings)),
            "WORLD_SIZE": str(num_procs),
            "LOCAL_WORLD_SIZE": str(num_procs),
            FAILURE_FOLDER_VARIABLE: str(private),
            SCRATCH_VARIABLE: str(private),
            _LAUNCHER_VARIABLE: str(os.getpid()),
        }
        command = [sys.executable, "-m", "vissl_zero.launch.rank_group", plan_folder, work]
        try:
            for index in range(num_procs):
                of_rank = shared | {"RANK": str(index), "LOCAL_RANK": str(index)}
                with _output(log_folder, first_rank + index) as log:
                    self._ranks.append(subprocess.Popen(command, env=of_rank, stdout=log, stderr=log))
        except BaseException:
            self.kill()  # the caller gets no group, so it could not end the ranks that run
            raise

    def wait(self) -> dict[int, int]:
        """Wait until all ranks have ended and return rank -> exit code (negative: a signal) of those not killed here.

        After a rank has failed, the others have ``_GRACE_S`` seconds to end; then they are killed.
        """
        deadline = None
        with self._forwarded_signals():
            while any(rank.poll() is None for rank in self._ranks):
                codes = [rank.returncode for rank in self._ranks if rank.poll() is not None]
                if deadline is None and any(code not in (0, stopping.STOPPED, stopping.INTERRUPTED) for code in codes):
                    deadline = time.monotonic() + _GRACE_S
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        ended = {
            self._first_rank + index: rank.returncode
            for index, rank in enumerate(self._ranks)
            if rank.poll() is not None
        }
        self.kill()
        return ended

    def kill(self) -> None:
        """Kill the ranks that still run, and wait for them."""
        self.end()
        for rank in self._ranks:
            rank.wait()

    def end(self) -> None:
        """Send SIGKILL to the ranks that still run. Any thread, or a signal handler, may call this."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.kill()

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Forward signals to save and stop to the ranks; a second Ctrl-C kills them. A context."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.asked is not None and self.asked.exit_code == stopping.INTERRUPTED:
                self.was_killed_by_user = True
                self.end()
                return
            is_ctrl_c = number == signal.SIGINT
            if is_ctrl_c:  # before the first step, or during a long one, the user would see no reaction
                print("\nSaving and stopping; Ctrl-C again ends at once, unsaved.", file=sys.stderr, flush=True)
            if self.asked is None or is_ctrl_c:
                code = stopping.INTERRUPTED if is_ctrl_c else stopping.STOPPED
                self.asked = stopping.Stop(signal.Signals(number).name, code)
            for rank in self._ranks:
                if rank.poll() is None:
                    rank.send_signal(number)

        before: dict[Any, Any] = {}
        try:
            for number in (*stopping.handled_signals(), signal.SIGINT):
                before[number] = signal.signal(number, forward)
        except ValueError:  # not in the main thread: the caller handles signals
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _output(log_folder: Path, rank: int) -> Iterator[Any]:
    if rank == 0:
        yield None
        return
    with (log_folder / f"rank{rank}.log").open("ab") as log:
        yield log


def main() -> int:
    """Run one rank: ``argv`` has the plan's folder and the module whose ``main`` is run. Returns the exit code."""
    tolerate_lost_output()
    be_killed_first()
    end_with_parent(int(os.environ[_LAUNCHER_VARIABLE]))  # else it could outlive its launcher, which holds the lock
    stopping.listen(ctrl_c=False)
    # Ctrl-C reaches every process of the terminal, and the launcher forwards it too: two signals count as one.
    signal.signal(signal.SIGINT, _on_ctrl_c)
    work = import_at_once(f"vissl_zero.launch.{sys.argv[2]}")
    gc.freeze()  # what was imported stays: later collections leave it out
    code: int = work.main()
    return code


def be_killed_first(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Let the kernel kill this rank before its launcher if memory is short: a launcher can restart ranks."""
    with suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _OOM_SHARE)))


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    stopping.request_stop("Ctrl-C", stopping.INTERRUPTED)


if __name__ == "__main__":
    # os._exit: a failed rank must not wait for threads of a process group whose peers are gone. A finished rank has
    # closed its files and left the group. To shut down the interpreter while threads of gloo still run could crash it
    # (seen once in a finished run on two machines: SIGABRT).
    code = main()
    for child in multiprocessing.active_children():  # workers that load data
        child.kill()  # SIGTERM would not reach a stopped process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
