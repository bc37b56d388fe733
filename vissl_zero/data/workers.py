"""Loader workers: processes that load micro-batches ahead, and end with their rank.

Each worker receives plans and sends batches through its own socket. So the training process waits for one worker at a
time, with a timeout: a worker that is killed, stopped or hung ends the iteration with an error that names it. torch's
DataLoader would wait forever for a stopped worker, and passes each batch through three threads.
"""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch._utils import ExceptionWrapper

from vissl_zero.config.blocks.data import Data
from vissl_zero.data.batch_memory import BatchReceiver, BatchSender
from vissl_zero.data.dataset import ImageBatch, Loaded, MicroBatchDataset, MicroBatchPlan
from vissl_zero.errors import DataError, ProcessLostError, printable
from vissl_zero.lifetime import end_with_creator, register_for_cleanup, signal_name, start_fork_server

logger = logging.getLogger(__name__)
# A plain fork would copy a process in which gloo, OpenMP and CUDA threads hold locks; spawn would import torch in every
# worker. The fork server imports once and has a single thread. It is VISSL's default too.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["vissl_zero.data.fork_server", "vissl_zero.data.workers"]
_AHEAD = 2  # micro-batches that a worker loads before they are needed
_reported: set[str] = set()  # skipped images, reported once per process: training, kNN and probes read the same ones
_START_S = 120.0  # added for the first micro-batch: the fork server imports torch, perhaps from a slow disk
_REAPED_S = 2.0  # the exit code of a dead worker arrives through the fork server


class BatchStream:
    """Loads planned micro-batches, in the process itself or in workers that stay alive between epochs.

    Args:
        dataset: data set that loads a plan.
        data_cfg: the resolved DATA block (NUM_DATALOADER_WORKERS, PIN_MEMORY, WORKER_TIMEOUT_S).
        fate: what the caller does without a broken image, a sentence for the message that names it.
    """

    def __init__(
        self,
        dataset: MicroBatchDataset,
        data_cfg: Data,
        fate: str = "The next readable image takes its place.",
    ):
        self._dataset = dataset
        self._fate = fate
        self._num_workers = data_cfg.NUM_DATALOADER_WORKERS
        self._timeout_s = data_cfg.WORKER_TIMEOUT_S or 0.0
        self._has_begun = False
        self._workers: list[Any] = []
        self._connections: list[Connection] = []
        self._receivers: list[BatchReceiver] = []
        self._due: deque[int] = deque()  # workers that still have to answer, in the order of micro-batches
        if self._num_workers:
            # The list itself, not its content: workers are added later, and ``finalize`` must not keep this object
            # alive.
            finalize(self, _kill, self._workers)
            register_for_cleanup()
        self._pins = data_cfg.PIN_MEMORY and torch.cuda.is_available()
        self._pinner: ThreadPoolExecutor | None = None
        if self._pins and self._num_workers:
            # One thread for all epochs: glibc gives each new thread one of several heaps, and batches would leave free
            # memory in all of them. The current CUDA device is per thread.
            device = torch.cuda.current_device()
            self._pinner = ThreadPoolExecutor(1, "pinned memory", torch.cuda.set_device, (device,))

    def load(self, plans: Iterable[MicroBatchPlan]) -> Iterator[ImageBatch]:
        """Yield the micro-batches of ``plans``, in order. Only one iteration may be active at a time.

        Raises:
            DataError: an image cannot be used.
            ProcessLostError: a worker died, or has not answered for WORKER_TIMEOUT_S.
        """
        batches = self._from_workers(plans) if self._num_workers else map(self._dataset.__getitem__, plans)
        if self._pins:
            batches = map(Loaded.pin_memory, batches)
        if self._pinner is not None:
            batches = _ahead(self._pinner, batches)
        for loaded in batches:
            yield self._open(loaded)

    def _from_workers(self, plans: Iterable[MicroBatchPlan]) -> Iterator[Loaded]:
        """Yield loaded micro-batches in the order of plans; each worker has up to ``_AHEAD`` plans ahead."""
        if not self._workers:
            self._start_workers()
        # An abandoned iteration leaves answers in the sockets, which would be taken for those of this one.
        while self._due:
            self._received()
        turns, coming = itertools.cycle(range(self._num_workers)), iter(plans)
        for plan in itertools.islice(coming, self._num_workers * _AHEAD):
            self._ask(next(turns), plan)
        while self._due:
            answer = self._received()
            for plan in itertools.islice(coming, 1):
                self._ask(next(turns), plan)
            if isinstance(answer, ExceptionWrapper):
                answer.reraise()
            yield answer

    def _start_workers(self) -> None:
        # The pipeline's module is imported in the fork server, and its pages are shared: OpenCV takes 75 MiB.
        start_fork_server([*_PRELOAD, type(self._dataset.pipeline).__module__])
        for index in range(self._num_workers):
            connection, worker_end = _CONTEXT.Pipe()
            worker = _CONTEXT.Process(target=_work, args=(self._dataset, worker_end), name=f"loader worker {index}")
            worker.daemon = True  # the training process does not wait for it at exit
            worker.start()
            worker_end.close()  # the worker then has the only copy, and its death closes the connection
            self._workers.append(worker)
            self._connections.append(connection)
            self._receivers.append(BatchReceiver(connection))
            self._receivers[-1].set_timeout(self._timeout_s and self._timeout_s + _START_S)

    def _ask(self, turn: int, plan: MicroBatchPlan) -> None:
        self._due.append(turn)
        with suppress(ConnectionError):  # a dead worker is reported when its answer is due
            self._connections[turn].send(plan)

    def _received(self) -> Any:
        """Return the next answer. Raises ProcessLostError."""
        turn = self._due.popleft()
        try:
            answer = self._receivers[turn].receive()
        except BlockingIOError:
            raise ProcessLostError(self._give_up_on(turn)) from None
        except (EOFError, OSError) as error:
            raise self._explained(error) from error
        if not self._has_begun:
            self._has_begun = True
            for receiver in self._receivers:
                receiver.set_timeout(self._timeout_s)
        return answer

    def _give_up_on(self, turn: int) -> str:
        """Kill all workers, and return an error message that names stopped workers, or else worker ``turn``."""
        workers = [(index, worker.pid) for index, worker in enumerate(self._workers)]
        stopped = [f"worker {index} (process {pid}, which is stopped)" for index, pid in workers if _is_stopped(pid)]
        slow = [f"worker {index} (process {pid})" for index, pid in workers if index == turn]
        names = " and ".join(stopped or slow)
        _kill(self._workers)
        return (
            f"A micro-batch has not come within {self._timeout_s:g} s from data loading {names}. Look at the disk that "
            "the images are on; raise config.DATA.WORKER_TIMEOUT_S if a micro-batch may take that long."
        )

    def _explained(self, error: BaseException) -> BaseException:
        """Return an error that says how workers ended; ``error`` itself if all are alive."""
        for worker in self._workers:
            # A share for each, so that waiting for all takes no longer than for one.
            worker.join(_REAPED_S / self._num_workers)
        dead = [(index, worker) for index, worker in enumerate(self._workers) if not worker.is_alive()]
        if not dead:
            return error
        names = ", ".join(f"worker {index} (process {one.pid}) {_how_ended(one.exitcode)}" for index, one in dead)
        _kill(self._workers)
        if any(one.exitcode > 0 for _, one in dead):
            advice = (
                'Its own error stands above. A script of your own must start its work under if __name__ == "__main__".'
            )
        else:
            advice = (
                "Usually the machine ran out of memory: lower config.DATA.NUM_DATALOADER_WORKERS "
                f"({self._num_workers} per process; 0 loads in the training process itself)."
            )
        was_killed = any(one.exitcode == -signal.SIGKILL for _, one in dead)
        return ProcessLostError(f"Data loading {names}. {advice}", was_killed)

    def _open(self, loaded: Loaded) -> ImageBatch:
        for name, reason in loaded.skipped.items():
            if name not in _reported:
                _reported.add(name)
                skipped = printable(f"Skipping {name}: {reason}.")
                logger.warning("%s %s", skipped, self._fate)
        if loaded.batch is None:
            raise DataError(loaded.error)
        return loaded.batch


def _kill(workers: Iterable[Any]) -> None:
    for worker in workers:
        with suppress(OSError, ValueError, AttributeError):  # ended, or never started
            worker.kill()


def _work(dataset: MicroBatchDataset, connection: Connection) -> None:
    """Answer each plan with its batch, until the training process closes the connection."""
    end_with_creator()
    register_for_cleanup()
    # As many threads as cores in every worker would compete with each other and with the training process.
    torch.set_num_threads(1)
    # Garbage collection writes to every object, and so would copy all pages shared with the fork server.
    gc.freeze()
    sender = BatchSender(connection)
    with suppress(EOFError, ConnectionError):
        while True:
            sender.send(_answer(dataset, connection.recv(), sender))


def _answer(dataset: MicroBatchDataset, plan: MicroBatchPlan, sender: BatchSender) -> Loaded | ExceptionWrapper:
    try:
        return dataset.load(plan, sender.empty)
    except Exception:  # noqa: BLE001 - raised again in the training process
        return ExceptionWrapper(where="in a loader worker")


def _ahead(thread: ThreadPoolExecutor, batches: Iterator[Loaded]) -> Iterator[Loaded]:
    """Yield ``batches``, with the thread one batch ahead."""
    coming = thread.submit(next, batches, None)
    while (loaded := coming.result()) is not None:
        coming = thread.submit(next, batches, None)
        yield loaded


def _is_stopped(pid: int) -> bool:
    try:
        # After the last ")": the name in the second field may have spaces and brackets itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _how_ended(code: int | None) -> str:
    return f"was ended by {signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
