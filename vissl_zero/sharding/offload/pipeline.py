"""Read the records of item k+1 and write those of item k-1 while item k is being updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile, PageBuffer

READ_AHEAD = 2
WRITE_BEHIND = 2
NUM_TRAYS = READ_AHEAD + 1 + WRITE_BEHIND


@dataclass(frozen=True)
class Cell:
    """One record that an item needs.

    Attributes:
        file, index: where it is.
        is_read: False where it is about to be overwritten: the buffer then holds anything.
    """

    file: BlockFile
    index: int
    is_read: bool = True


# What is updated at once: at most one cell for each column of buffers.
Item = Sequence[Cell | None]
Tray = list[PageBuffer]


class Pipeline:
    """Streams items through a fixed number of trays, which have one buffer per column.

    Args:
        column_bytes: size of the largest record in each column; 0 for one that is not used.
    """

    def __init__(self, column_bytes: Sequence[int]):
        self.num_columns = len(column_bytes)
        self._trays: list[Tray] = [[PageBuffer(size) for size in column_bytes] for _ in range(NUM_TRAYS)]
        # The calls release the interpreter's lock; as many threads as requests may be under way.
        self._threads = ThreadPoolExecutor(READ_AHEAD + WRITE_BEHIND, thread_name_prefix="offload")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for tray in self._trays for buffer in tray if buffer.num_bytes]

    def run(self, items: Sequence[Item], update: Callable[[int, Tray], Collection[int]]) -> None:
        """Call ``update(position, tray)`` for each item in order, and store the columns that it names.

        Raises:
            OffloadError: a record could not be read or stored; all requests under way have ended then.
        """
        free = deque(self._trays)
        ahead = deque(enumerate(items))
        reads: deque[tuple[int, Tray, Future[None]]] = deque()
        writes: deque[tuple[Tray, Future[None]]] = deque()
        try:
            while ahead or reads:
                while ahead and free and len(reads) <= READ_AHEAD:
                    position, item = ahead.popleft()
                    tray = free.popleft()
                    reads.append((position, tray, self._threads.submit(_read, item, tray)))
                if not reads:
                    free.append(_finish(writes))
                    continue
                position, tray, reading = reads.popleft()
                reading.result()
                if columns := update(position, tray):
                    writes.append((tray, self._threads.submit(_write, items[position], tray, columns)))
                else:
                    free.append(tray)
                while writes and (writes[0][1].done() or len(writes) > WRITE_BEHIND):
                    free.append(_finish(writes))
            while writes:
                _finish(writes)
        finally:
            for pending in (*(reading for _, _, reading in reads), *(writing for _, writing in writes)):
                pending.exception()  # wait: the buffers are about to be reused

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _read(item: Item, tray: Tray) -> None:
    for cell, buffer in zip(item, tray, strict=True):
        if cell is not None and cell.is_read:
            cell.file.read(cell.index, buffer)


def _write(item: Item, tray: Tray, columns: Collection[int]) -> None:
    for column in columns:
        cell = item[column]
        assert cell is not None
        cell.file.write(cell.index, tray[column])


def _finish(writes: deque[tuple[Tray, Future[None]]]) -> Tray:
    tray, writing = writes.popleft()
    writing.result()
    return tray
