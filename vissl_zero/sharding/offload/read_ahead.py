"""Records of a file, read in the order in which they are expected to be wanted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile, PageBuffer, page_buffers

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
