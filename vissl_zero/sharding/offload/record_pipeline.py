"""Read the records of the next items, and write those of the last ones, while one item is being updated.

Parameters are read ahead in the order in which the last step wanted them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
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


class RecordPipeline:
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


_Pair = tuple[int | None, int | None]


class PrefetchOrder:
    """Learns an order that repeats from step to step.

    Two units tell forward from backward, where the same ones come in the other order. Pure.
    """

    def __init__(self) -> None:
        self._next: dict[_Pair, int] = {}
        self._last: _Pair = (None, None)

    def came(self, unit: int) -> None:
        """``unit`` is wanted now."""
        self._next[self._last] = unit
        self._last = (self._last[1], unit)

    def restart(self) -> None:
        """A step begins: the order of the last step is expected again."""
        # Without it, the end of one step would be taken for the context of the next one's beginning.
        self._last = (None, None)

    def expected(self) -> Iterator[int]:
        """Units in the order in which they are expected; may never end."""
        last = self._last
        while last in self._next:
            unit = self._next[last]
            yield unit
            last = (last[1], unit)


NUM_BUFFERS = 16
_NUM_THREADS = 4


class ReadAhead:
    """A fixed number of buffers that are filled with the next records as soon as they are free.

    Args:
        file: the records; whoever changes one must call ``forget`` first.
        record_bytes: size of the largest.
    """

    def __init__(self, file: BlockFile, record_bytes: int):
        self._file = file
        self._buffers = page_buffers([record_bytes] * NUM_BUFFERS)
        self._free = deque(self._buffers)
        self._todo: deque[int] = deque()
        self._reads: deque[tuple[int, PageBuffer, Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefetch")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for buffer in self._buffers]

    @property
    def expected(self) -> list[int]:
        """The records that come next, those already read or being read first."""
        return [*(index for index, _, _ in self._reads), *self._todo]

    def follow(self, records: Sequence[int]) -> None:
        """Expect these records next, in this order; what has been read of them already is kept."""
        num_kept = 0
        for (index, _, _), record in zip(self._reads, records, strict=False):
            if index != record:
                break
            num_kept += 1
        self._drop(len(self._reads) - num_kept)
        self._todo = deque(records[num_kept:])
        self._fill()

    def take(self) -> tuple[int, PageBuffer]:
        """The next expected record; ``give_back`` its buffer before the next call.

        Raises:
            OffloadError: it could not be read, or is not what was written.
        """
        index, buffer, reading = self._reads.popleft()
        try:
            reading.result()
        # A failed read must not lose its buffer: their number is fixed.
        except BaseException:
            self._free.append(buffer)
            raise
        return index, buffer

    def give_back(self, buffer: PageBuffer) -> None:
        """Let ``buffer`` be filled again."""
        self._free.append(buffer)
        self._fill()

    def forget(self) -> None:
        """Expect nothing, and drop what was read."""
        self._todo.clear()
        self._drop(len(self._reads))

    def close(self) -> None:
        """End the threads."""
        self.forget()
        self._threads.shutdown()

    def _fill(self) -> None:
        while self._todo and self._free:
            index, buffer = self._todo.popleft(), self._free.popleft()
            self._reads.append((index, buffer, self._threads.submit(self._file.read, index, buffer)))

    def _drop(self, number: int) -> None:
        for _ in range(number):
            # From the end, since what is kept is the front.
            _, buffer, reading = self._reads.pop()
            reading.exception()  # wait: the buffer is about to be reused
            self._free.append(buffer)
