"""torch's DataLoader as it is used here: a micro-batch per item, clear errors, workers that end with their rank.

A worker that is killed, stopped or hung ends the iteration with a sentence that names it. torch alone would wait
forever for a stopped worker, in places that its own ``timeout`` does not cover: between epochs, and while it asks a
worker for
the file descriptor of a batch.
"""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import torch
from torch.utils.data import DataLoader, Dataset

from vissl_zero.config.blocks.data import Data
from vissl_zero.data.batch_memory import BatchSender, PackedBatch, forget_blocks
from vissl_zero.data.dataset import ImageBatch, Loaded, MicroBatchDataset, MicroBatchPlan
from vissl_zero.errors import DataError, ProcessLostError, printable
from vissl_zero.lifetime import end_with_creator, note_shares, signal_name, start_fork_server

logger = logging.getLogger(__name__)
# VISSL's default (5) exceeds the cores of a laptop, and torch would warn twice about each loader of a run.
warnings.filterwarnings("ignore", message="This DataLoader will create")

# VISSL's own default. A plain fork would copy a process in which gloo, OpenMP and CUDA threads hold locks; spawn would
# import torch again in every worker. The fork server imports once and has a single thread.
START_METHOD = "forkserver"
_PRELOAD = ["vissl_zero.data.fork_server", "vissl_zero.data.workers"]
_END = object()
_reported: set[str] = set()  # images that this process has skipped: training, kNN and probes read the same ones
_START_S = 120.0  # more for the first micro-batch: the fork server imports torch, perhaps from a slow disk
_REAPED_S = 2.0  # until the fork server has told how a worker ended


class Plans:
    """The micro-batches to load next; a DataLoader's sampler that can be pointed at another epoch."""

    def __init__(self) -> None:
        self.plans: Iterable[MicroBatchPlan] = ()

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self.plans)


class BatchStream:
    """Loads planned micro-batches, in the process itself or in workers that stay alive between epochs.

    Args:
        dataset: turns a plan into a batch.
        data_cfg: the resolved DATA block (NUM_DATALOADER_WORKERS, PIN_MEMORY, WORKER_TIMEOUT_S).
    """

    def __init__(self, dataset: MicroBatchDataset, data_cfg: Data):
        num_workers = data_cfg.NUM_DATALOADER_WORKERS
        self._timeout_s = 0.0
        self._plans = Plans()
        self._has_begun = False
        self._workers: list[Any] = []
        # OpenCV, which the fast backend imports, would be 75 MiB in each worker.
        self._preload = [*_PRELOAD, type(dataset.pipeline).__module__]
        if num_workers:
            # Also at the exit. torch asks a worker to end through a queue, which is closed already where stream and
            # queue are freed together, as part of a traceback; then it sends SIGTERM, which workers ignore, and joins.
            finalize(self, _kill, self._workers)
            self._timeout_s = data_cfg.WORKER_TIMEOUT_S or 0.0
            note_shares()
        pins = data_cfg.PIN_MEMORY and torch.cuda.is_available()
        self._device = torch.cuda.current_device() if pins else None
        self._loader: DataLoader[Any] = DataLoader(
            _Sent(dataset) if num_workers else dataset,
            sampler=self._plans,
            batch_size=None,  # an index is a whole micro-batch already
            collate_fn=_as_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=START_METHOD if num_workers else None,
            worker_init_fn=_begin_worker if num_workers else None,
            pin_memory=pins,
            generator=torch.Generator(),  # otherwise every epoch takes a number from the global generator
        )

    def load(self, plans: Iterable[MicroBatchPlan]) -> Iterator[ImageBatch]:
        """Yield the micro-batches of ``plans``, in order; one such iteration at a time.

        Raises:
            DataError: an image cannot be used.
            ProcessLostError: a worker died, or has not answered for WORKER_TIMEOUT_S.
        """
        self._plans.plans = plans
        for loaded in self._from_workers() if self._loader.num_workers else self._loader:
            yield self._open(loaded)

    def _from_workers(self) -> Iterator[Loaded]:
        """Yield what the workers load. A thread waits for them, so that whatever it is stuck in, this can give up."""
        requests: SimpleQueue[bool] = SimpleQueue()
        answers: SimpleQueue[Any] = SimpleQueue()
        arguments = (self._loader, self._workers, self._device, self._preload, requests, answers)
        Thread(target=_serve, args=arguments, daemon=True, name="loader workers").start()
        try:
            for number in itertools.count():
                requests.put(True)
                try:
                    answer = answers.get(timeout=self._timeout_s + (0.0 if self._has_begun else _START_S))
                except Empty:
                    raise ProcessLostError(self._give_up_on(number % self._loader.num_workers)) from None
                if isinstance(answer, BaseException):
                    raise self._explained(answer)
                if answer is _END:
                    return
                self._has_begun = True
                yield answer
        finally:
            requests.put(False)

    def _give_up_on(self, turn: int) -> str:
        """Kill all workers. Returns the sentence that names those to blame: stopped ones, else the one that is due."""
        workers = [(index, worker.pid) for index, worker in enumerate(self._workers)]
        stopped = [f"worker {index} (process {pid}, which is stopped)" for index, pid in workers if _is_stopped(pid)]
        slow = [f"worker {index} (process {pid})" for index, pid in workers if index == turn]
        names = " and ".join(stopped or slow) or "workers, which have not started"
        _kill(self._workers)
        return (
            f"A micro-batch has not come within {self._timeout_s:g} s from data loading {names}. Look at the disk that "
            "the images are on; raise config.DATA.WORKER_TIMEOUT_S if a micro-batch may take that long."
        )

    def _explained(self, error: BaseException) -> BaseException:
        """Explain an error of torch's, or of the socket that a batch was to come through, where a worker has died."""
        if not isinstance(error, OSError | EOFError) and not str(error).startswith("DataLoader worker"):
            return error
        for worker in self._workers:
            worker.join(_REAPED_S / self._loader.num_workers)
        dead = [(index, worker) for index, worker in enumerate(self._workers) if not worker.is_alive()]
        if not dead and isinstance(error, OSError | EOFError):
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
                f"({self._loader.num_workers} per process; 0 loads in the training process itself)."
            )
        lost = ProcessLostError(
            f"Data loading {names or f'workers died ({error})'}. {advice}",
            any(one.exitcode == -signal.SIGKILL for _, one in dead),
        )
        lost.__cause__ = error
        return lost

    def _open(self, loaded: Loaded) -> ImageBatch:
        for name, reason in loaded.skipped.items():
            if name not in _reported:
                _reported.add(name)
                skipped = printable(f"Skipping {name}: {reason}.")
                logger.warning("%s The next readable image takes its place.", skipped)
        if loaded.batch is None:
            raise DataError(loaded.error)
        return loaded.batch


def _kill(workers: Iterable[Any]) -> None:
    for worker in workers:
        with suppress(OSError, ValueError, AttributeError):  # gone, or never begun
            worker.kill()
            forget_blocks([worker.pid])


class _Sent(Dataset[PackedBatch]):
    """Packs what a worker loads.

    torch would share each tensor anew, in a thread that prints errors and drops the batch; the training process would
    then wait for the batch forever.
    """

    def __init__(self, dataset: MicroBatchDataset):
        self._dataset = dataset
        self._sender = BatchSender()

    def __getitem__(self, plan: MicroBatchPlan) -> PackedBatch:
        self._sender.reclaim()
        return self._sender.pack(self._dataset.load(plan, self._sender.empty))


def _serve(
    loader: DataLoader[Any],
    workers: list[Any],
    device: int | None,
    preload: Sequence[str],
    requests: SimpleQueue[bool],
    answers: SimpleQueue[Any],
) -> None:
    """Answer each request in a thread: a batch, an error or the end, until there is none. Fills ``workers``."""
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own, and the loader pins memory for it
    batches: Iterator[Any] | None = None
    while requests.get():
        try:
            if batches is None:
                start_fork_server(preload)  # not left to torch, which would do it in this thread: it ends soon
                batches = iter(loader)
                workers[:] = getattr(batches, "_workers", ())  # torch has no public name for them
            answer = next(batches, _END)
            answers.put(answer.unpack() if isinstance(answer, PackedBatch) else answer)
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            answers.put(error)


def _begin_worker(index: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch has just set a handler, unlike for the fork server's others
    end_with_creator()
    note_shares()
    # A collection would write to every object that the fork server has imported, and so copy its page.
    gc.freeze()


def _as_is(loaded: Any) -> Any:
    return loaded


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _how_ended(code: int | None) -> str:
    return f"was ended by {signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
