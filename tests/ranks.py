"""Real ranks for tests: one pool of gloo processes for a whole test session.

    from tests.ranks import run_on_ranks

    def _sum_of_ranks(offset: int) -> float:  # a top-level function of the test module
        total = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(total)
        return total.item()

    def test_sum() -> None:
        assert run_on_ranks(3, _sum_of_ranks, 10) == [33.0, 33.0, 33.0]

Processes are forked from one that has torch imported (about 3 s, once), and each task gets a process group of its own
(about 0.01 s). A rank that raises fails the test with its traceback; one that hangs is killed after ``timeout_s``, with
the stack it hung in, and the pool starts afresh.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import inspect
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

MAX_RANKS = 4
GRACE_S = 3.0  # for the others to finish once one rank has failed
START_S = 120.0  # for new processes to import torch; a test's own time starts after it
STACK_S = 5.0  # for a rank that hung to write down where
# fairscale's wrappers outlive their task, and so do gloo's threads of their groups, which poll without rest once the
# other ranks have gone: hundreds of them make everything many times slower. Then new processes take over.
MAX_THREADS = 40
# Imported once, before the fork. fully_shard imports torch._dynamo on first use, and most tests train through the last.
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "fairscale.nn"]
_PRELOAD += ["vissl_zero.config.compose", "vissl_zero.planner.forecast", "tests.dist.training"]
# Otherwise each new set of processes, of which a session has dozens, would import them again.
_PRELOAD += ["pytest", "vissl_zero.engine.build", "vissl_zero.integration.initialize"]


class RankError(AssertionError):
    """A rank raised or hung; the message has the traceback or stack of every rank concerned."""


@dataclass(frozen=True)
class _Task:
    """What one worker runs. ``arguments`` is pickled apart: the test module must be imported before it can be read."""

    module_name: str
    source_file: str
    function: str
    arguments: bytes
    rank: int
    world_size: int
    folder: str
    timeout_s: float
    group_timeout_s: float

    @property
    def stack_file(self) -> Path:
        return Path(self.folder) / f"stack_{self.rank}.txt"


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, group_timeout_s: float | None = None
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks with an initialized gloo group and one thread each.

    Args:
        world_size: 1 to 4.
        fn: a top-level function of a module; its result must be picklable (tensors are).
        args: picklable.
        timeout_s: for the whole call; then the processes are killed.
        group_timeout_s: of every collective; ``timeout_s`` if None.
    Returns:
        What each rank returned, by rank.
    Raises:
        RankError: a rank raised, died or hung.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
    global _pool
    if _pool is None:
        _pool = _Pool()
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        tasks = [
            _Task(
                module_name=fn.__module__,
                source_file=inspect.getsourcefile(fn) or "",
                function=fn.__qualname__,
                arguments=pickle.dumps(args),
                rank=rank,
                world_size=world_size,
                folder=folder,
                timeout_s=timeout_s,
                group_timeout_s=group_timeout_s or timeout_s,
            )
            for rank in range(world_size)
        ]
        return _pool.run(tasks)


@contextmanager
def log_messages(name: str = "vissl_zero", level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what the logger ``name`` is given, whatever handlers an earlier task has left in this process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger, level_before = logging.getLogger(name), logging.getLogger(name).level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)


def preload(*names: str) -> None:
    """Have modules imported before processes are forked, if none have been yet in this session."""
    _PRELOAD.extend(name for name in names if name not in _PRELOAD)


def close_pool() -> list[int | None]:
    """End the processes and give their exit codes; the next ``run_on_ranks`` starts new ones."""
    global _pool
    if _pool is None:
        return []
    codes = _pool.close()
    _pool = None
    return codes


class _Pool:
    """``MAX_RANKS`` worker processes and a pipe to each."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, "tests.frozen"])
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._is_ready = False
        for _ in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            for pipe in self._pipes:
                if not pipe.poll(START_S):
                    raise RankError(f"a process of the pool did not start within {START_S:.0f} s")
            self._port, *_ = [pipe.recv() for pipe in self._pipes]
            self._is_ready = True

    def run(self, tasks: list[_Task]) -> list[Any]:
        self._wait_until_ready()
        for pipe, task in zip(self._pipes, tasks, strict=False):
            pipe.send((task, self._port))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + tasks[0].timeout_s
        while len(answers) < len(tasks) and (left := deadline - time.monotonic()) > 0:
            waiting = {self._pipes[task.rank]: task.rank for task in tasks if task.rank not in answers}
            for ready in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[ready]
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        bad = {rank: answer for rank, (is_ok, answer) in sorted(answers.items()) if not is_ok}
        # Ranks that died come first: the others failed because of them.
        dead = {rank: f"{bad[rank]}; it was in:\n{_stack(tasks[rank])}" for rank in bad if self._has_died(rank)}
        failures = [f"rank {rank}: {answer}" for rank, answer in {**dead, **bad, **dead}.items()]
        hung = [task for task in tasks if task.rank not in answers]
        if hung or failures:
            self._restart(hung)
            failures += [f"rank {task.rank} did not end; it was in:\n{_stack(task)}" for task in hung]
            raise RankError("\n\n".join(failures))
        if any(_num_threads(process.pid) > MAX_THREADS for process in self._processes):
            assert set(self.close()) <= {0}
            self._start()
        return [answers[rank][1] for rank in range(len(tasks))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            is_ok, answer = self._pipes[rank].recv()
            return is_ok, pickle.loads(answer) if is_ok else answer
        except EOFError:
            self._processes[rank].join(GRACE_S)
            return False, f"the process died with exit code {self._processes[rank].exitcode}"

    def _has_died(self, rank: int) -> bool:
        return self._processes[rank].exitcode is not None

    def _restart(self, hung: list[_Task]) -> None:
        """Kill everything: after a failure no group can be trusted. Hung ranks first write down where they are."""
        for task in hung:
            pid = self._processes[task.rank].pid
            if pid is not None and self._processes[task.rank].is_alive() and task.stack_file.exists():
                os.kill(pid, _STACK_SIGNAL)
                deadline = time.monotonic() + STACK_S
                while not _stack(task) and time.monotonic() < deadline:
                    time.sleep(0.05)
        time.sleep(0.2 if hung else 0.0)  # a stack is written line by line
        for process in self._processes:
            process.kill()
            process.join()
        self._start()

    def close(self) -> list[int | None]:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10.0)
        return [process.exitcode for process in self._processes]


def _num_threads(pid: int | None) -> int:
    return len(list(Path(f"/proc/{pid}/task").glob("*")))


_pool: _Pool | None = None
_STACK_SIGNAL = signal.SIGUSR1


def _stack(task: _Task) -> str:
    return task.stack_file.read_text() if task.stack_file.exists() else "(no stack)"


def _work(pipe: multiprocessing.connection.Connection) -> None:
    import torch  # in the forkserver already; the tests that need no ranks must not wait for it

    torch.set_num_threads(1)
    # Where ranks find each other. A file would do, which ranks look at every 10 ms.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while (message := pipe.recv()) is not None:
        task, port = message
        with task.stack_file.open("w") as stack_file:
            faulthandler.register(_STACK_SIGNAL, stack_file)
            faulthandler.enable(stack_file)
            try:
                answer: tuple[bool, Any] = (True, pickle.dumps(_run(task, port)))
            except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
                answer = (False, traceback.format_exc())
            faulthandler.unregister(_STACK_SIGNAL)
            faulthandler.disable()
        pipe.send(answer)
        # Takes 10 ms a connection: the test goes on meanwhile.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@cache
def _store(port: int) -> Any:
    """Connect to the store once: torch asks for the peer's name, and a DNS server that is late costs 5 s each time."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _run(task: _Task, port: int) -> Any:
    import torch
    import torch.distributed as dist

    from vissl_zero.sharding.torch_private import forget_meshes

    function = getattr(_import_source(task.module_name, task.source_file), task.function)
    args = pickle.loads(task.arguments)
    num_modules = len(sys.modules)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(task.folder, _store(port)),
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout_s),
    )
    result = function(*args)
    forget_meshes()
    gc.collect()  # groups that are only in cycles: gloo's threads of a group that its peers have left never rest
    if len(sys.modules) > num_modules:
        gc.freeze()
    dist.barrier()  # nobody closes connections that a slower rank still uses
    return result


def _import_source(name: str, source_file: str) -> Any:
    """The test module under the name the parent knows it by, whatever way pytest imported it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source_file)
        assert spec is not None and spec.loader is not None, source_file
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        gc.freeze()  # what it brought stays: collections after each task then take milliseconds
    return sys.modules[name]


atexit.register(close_pool)
