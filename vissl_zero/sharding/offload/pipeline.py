"""Read the records of the next items, and write those of the last ones, while one item is being updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile, PageBuffer, page_buffers

NUM_TRAYS = 8
NUM_THREADS = 6  # requests under way; the calls release the interpreter's lock


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
        buffers = iter(page_buffers([*column_bytes] * NUM_TRAYS))
        self._trays: list[Tray] = [[next(buffers) for _ in column_bytes] for _ in range(NUM_TRAYS)]
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="offload")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for tray in self._trays for buffer in tray if buffer.num_bytes]

    def run(self, items: Sequence[Item], update: Callable[[int, Tray], Collection[int]]) -> None:
        """Call ``update(position, tray)`` for each item, and store the columns that it names.

        Items are taken as the disk has them ready, not in order: it may let one wait for as long as there are others.
        No two of them may share a record.

        Raises:
            OffloadError: a record could not be read or stored; all requests under way have ended then.
        """
        coming = deque(enumerate(items))
        ready: SimpleQueue[Future[tuple[int, Tray] | None]] = SimpleQueue()
        requests: set[Future[tuple[int, Tray] | None]] = set()

        def send(tray: Tray, old: Item, columns: Collection[int]) -> None:
            new = coming.popleft() if coming else None
            request = self._threads.submit(_exchange, tray, old, columns, new)
            requests.add(request)
            request.add_done_callback(ready.put)

        try:
            for tray in self._trays[: len(items)]:
                send(tray, (), ())
            while requests:
                # In the order of completion: a slow record delays no other.
                request = ready.get()
                requests.remove(request)
                if (turn := request.result()) is not None:
                    position, tray = turn
                    columns = update(position, tray)
                    if columns or coming:
                        send(tray, items[position], columns)
        finally:
            wait(requests)  # their buffers are about to be reused

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _exchange(tray: Tray, old: Item, columns: Collection[int], new: tuple[int, Item] | None) -> tuple[int, Tray] | None:
    """Write ``columns`` of the item that ``tray`` holds, then read another into it."""
    # One request writes the old item and reads the next: the tray is free for reuse without a second hand-over.
    for column in columns:
        cell = old[column]
        assert cell is not None
        cell.file.write(cell.index, tray[column])
    if new is None:
        return None
    position, item = new
    for cell, buffer in zip(item, tray, strict=True):
        if cell is not None and cell.is_read:
            cell.file.read(cell.index, buffer)
    return position, tray
