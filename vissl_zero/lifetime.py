"""Child processes and temporary folders that never outlive their owner, however it ends.

SIGKILL runs no handler and no ``finally``, so the kernel has to do it: a child asks to be killed with its parent, and a
temporary folder has a cleanup process, a shell that waits for its owner's end of a pipe to close. If that is killed, it
is replaced, and what is left where both are killed at once is removed by the next that makes such a folder. Imports no
torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import forkserver, process
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar, cast

from vissl_zero.errors import LaunchError

T = TypeVar("T")
SCRATCH_VARIABLE = "VISSL_ZERO_SCRATCH"
CREATOR_VARIABLE = "VISSL_ZERO_CREATOR"  # process id of the process that a fork server is for
SWEEP_VARIABLE = "VISSL_ZERO_SWEEP"  # process id of the sweep that a command line is a job of
_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10  # Linux; Python's fcntl has no name for it
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - names in it are random
_DYING_S = 5.0
_PREFIX = "vissl_zero_run_"
_OWNER = "owner"  # locked for as long as the owner of a folder lives
_LONGEST_PARENT = 60  # bytes: multiprocessing's sockets lie in the folder, and the kernel takes names of 107 bytes
_MADE_S = 60.0  # a folder without that file is older than this only if its maker was killed in between
# Arguments: the folder, the folder of shared memory. Twice, because what dies with the owner may still be writing.
_CLEANUP_SCRIPT = """
trap '' HUP INT TERM
read -r _
for attempt in 1 2; do
    sleep 0.5
    for note in "$1"/shares.*; do
        pid=${note##*.}
        rm -f -- "$2/torch_${pid}_"* "$2/sem.vissl-zero-$pid-"* "$2/sem.loky-$pid-"*
    done
    [ "$attempt" = 2 ] && rm -rf -- "$1"
done
"""


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. For a process that its parent has just started.

    The kernel takes the end of the thread that started it for that, so it has to be one that stays.

    Args:
        parent: process id of the parent; it may be gone by now.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


def run_in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function`` in a process forked for it and return its result, so that this one need not import torch.

    Where this one has torch already, it calls the function itself: nothing would be saved, and a process that is forked
    from torch's threads may hang.

    Args:
        function, arguments: what is returned, or raised, goes through pickle.
    Raises:
        LaunchError: that process was killed. Else what the function raises.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return function(*arguments)
    try:
        return forked(function, *arguments)
    except ChildProcessError:
        what = f"A process that was to find out {function.__name__.strip('_').replace('_', ' ')} was killed"
        why = "often by the kernel, out of memory: torch alone takes a quarter of a GiB"
        raise LaunchError(f"{what} ({why}). Give the run more memory, or end other processes.") from None


def forked(function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
    """Call ``function`` in a process forked for it; what it changes and breaks ends with that process.

    Args:
        function, arguments: what is returned, or raised, goes through pickle.
        timeout_s: after which the process is killed; None: never.
    Raises:
        ChildProcessError: that process was killed, by a signal or after the timeout. Else what the function raises.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, os.getpid(), function, arguments))
    child.start()
    sender.close()  # so that the child's end is the only one
    try:
        if not receiver.poll(timeout_s):
            child.kill()
        result, error, trace = receiver.recv()
    except EOFError:
        child.join()
        raise ChildProcessError(f"ended with exit code {child.exitcode}") from None
    finally:
        child.join()
        receiver.close()
    if error is not None:
        raise error from RuntimeError(trace)
    return cast("T", result)


def _answer(sender: Connection, parent: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function in the child and send its result."""
    end_with_parent(parent)
    answer: tuple[Any, Exception | None, str]
    try:
        answer = function(*arguments), None, ""
    except Exception as error:  # noqa: BLE001 - the parent raises it
        answer = None, error, "".join(traceback.format_exception(error))
    sender.send(answer)


def end_with_creator() -> None:
    """End with the creator, for a process of ``multiprocessing`` whose parent may be a fork server that nothing ends.

    A fork server that ``start_fork_server`` has not started lives as long as any of its processes, so watching the
    parent would not work. The process that asked for this one holds the other end of a pipe: when that closes, the
    kernel sends SIGKILL, which ends a stopped process too.
    """
    creator: Any = multiprocessing.parent_process()
    if creator is None or not sys.platform.startswith("linux"):
        return
    fcntl.fcntl(creator.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(creator.sentinel, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(creator.sentinel, fcntl.F_SETFL, fcntl.fcntl(creator.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not creator.is_alive():
        os._exit(1)  # it died before we asked


_to_start: SimpleQueue[Future[None]] = SimpleQueue()
_starter: Thread | None = None


def start_fork_server(preload: Sequence[str]) -> None:
    """Start this process's fork server, if it does not run; it and what it forks end with this process.

    Args:
        preload: modules that it imports; ``vissl_zero.data.fork_server``, the first one, asks the kernel for this.

    Raises:
        OSError: there is no room for a process.
    """
    global _starter
    os.environ[CREATOR_VARIABLE] = str(os.getpid())
    forkserver.set_forkserver_preload([*preload])
    if _starter is None or not _starter.is_alive():  # such as in a process that was forked from another
        _starter = Thread(target=_start_fork_servers, daemon=True, name="parent of the fork server")
        _starter.start()
    done: Future[None] = Future()
    _to_start.put(done)
    done.result()


def _start_fork_servers() -> None:
    """Start fork servers from a thread that never ends: they get a signal when the thread that started them ends."""
    while True:
        done = _to_start.get()
        try:
            done.set_result(forkserver.ensure_running())
        except BaseException as error:  # noqa: BLE001 - the thread that asked raises it
            done.set_exception(error)


class Scratch:
    """A folder that only this user can enter, removed by ``close``, or by its cleanup process if this one is killed.

    Use it as a context, or keep it until the process ends. With it go the shared memory and the semaphores of processes
    that have called ``register_for_cleanup``.

    Attributes:
        path: path of the folder.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
        self._is_closed = False
        self._read, write = os.pipe()  # neither end is inherited by other processes that this one starts
        self._open = [self._read, write]
        try:
            self._open.append(_lock_owner(self.path))
            self._cleanup_process = self._start_cleanup_process()
        except BaseException:
            self._close_files()
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        Thread(target=self._keep_cleanup_process, daemon=True, name="cleanup process of a temporary folder").start()

    def _start_cleanup_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", _CLEANUP_SCRIPT, "vissl-zero-cleanup", str(self.path), str(_SHARED_MEMORY)],
            stdin=self._read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It must not keep the file system of the folder where the run was started from being unmounted.
            cwd="/",
            start_new_session=True,  # out of reach of what kills the group
        )

    def _keep_cleanup_process(self) -> None:
        """Replace, in a thread, a cleanup process that was killed while the folder is in use."""
        while True:
            self._cleanup_process.wait()
            if self._is_closed:
                return
            try:
                self._cleanup_process = self._start_cleanup_process()
            except OSError:  # no room for a process: ``remove_abandoned`` is left
                return
            if self._is_closed:  # while it was started
                self._cleanup_process.kill()

    def close(self) -> None:
        """Remove the folder and what is shared under its processes' names; they must have been killed by now."""
        pids = _sharers(self.path)
        deadline = time.monotonic() + _DYING_S
        while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        _remove_shares(pids)
        self._is_closed = True
        self._cleanup_process.kill()
        self._cleanup_process.wait()
        shutil.rmtree(self.path, ignore_errors=True)
        self._close_files()

    def _close_files(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _parent() -> Path:
    """Return TMPDIR, or /tmp where that is too long a name for a folder with sockets."""
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) <= _LONGEST_PARENT else Path("/tmp")  # noqa: S108 - mkdtemp makes it


def _lock_owner(folder: Path) -> int:
    """Lock a folder's owner file until this process ends: the lock says that the owner lives. Return its descriptor."""
    new = folder / f"{_OWNER}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(folder / _OWNER)  # locked before anyone sees it
    return descriptor


def remove_abandoned() -> None:
    """Remove this user's temporary folders, and what is shared under their processes' names, whose owner is dead."""
    for folder in _parent().glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed by another process meanwhile
            status = folder.lstat()  # not of what a link names
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not _has_owner(folder):
                _remove_shares(_sharers(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _has_owner(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime < _MADE_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _sharers(folder: Path) -> list[int]:
    """Return the processes that have called ``register_for_cleanup``."""
    return [int(path.suffix[1:]) for path in folder.glob("shares.*")]


_own: Scratch | None = None


def _scratch_folder() -> Path:
    """Return the launcher's scratch folder, or one of this process."""
    global _own
    if configured := os.environ.get(SCRATCH_VARIABLE):
        return Path(configured)
    _own = _own or Scratch()
    return _own.path


def register_for_cleanup() -> None:
    """Have named resources of ``multiprocessing``, such as semaphores, removed if this process is killed.

    Its sockets go into the scratch folder, its semaphores get this process's number into their names (torch gives it to
    shared memory). Processes started afterward inherit the folder.
    """
    config: Any = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        config["tempdir"] = str(_scratch_folder())
        config["semprefix"] = f"/vissl-zero-{os.getpid()}"
    with suppress(OSError):  # no room: what is left then is a file of 32 bytes
        (Path(config["tempdir"]) / f"shares.{os.getpid()}").touch()


def _remove_shares(pids: list[int]) -> None:
    """Remove the shared memory and semaphores of processes that have ended."""
    if not pids or not _SHARED_MEMORY.is_dir():
        return
    numbers = "|".join(map(str, pids))
    # joblib, which scikit-learn imports, has the standard library name its semaphores `loky`.
    ours = re.compile(rf"(torch_({numbers})_|sem\.(vissl-zero|loky)-({numbers})-).*")
    for path in _SHARED_MEMORY.iterdir():
        if ours.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        # A zombie has given up its memory and files already, though it still has an entry.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def signal_name(number: int) -> str:
    """Name a signal, such as SIGKILL; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
