"""Read record k+1 and write record k-1 while record k is being updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile, PageBuffer

READ_AHEAD = 2
WRITE_BEHIND = 2
NUM_BUFFERS = READ_AHEAD + 1 + WRITE_BEHIND


class Pipeline:
    """Streams records of a file through a fixed number of buffers.

    Args:
        file: the records.
        record_bytes: size of the largest.
    """

    def __init__(self, file: BlockFile, record_bytes: int):
        self._file = file
        self._buffers = [PageBuffer(record_bytes) for _ in range(NUM_BUFFERS)]
        # The calls release the interpreter's lock; as many threads as requests may be under way.
        self._threads = ThreadPoolExecutor(READ_AHEAD + WRITE_BEHIND, thread_name_prefix="offload")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for buffer in self._buffers]

    def run(self, indices: Sequence[int], update: Callable[[int, PageBuffer], bool]) -> None:
        """Call ``update(index, buffer)`` for each record in order; where it returns True, store what it left.

        Raises:
            OffloadError: a record could not be read or stored; all requests under way have ended then.
        """
        free = deque(self._buffers)
        reads: deque[tuple[int, PageBuffer, Future[None]]] = deque()
        writes: deque[tuple[PageBuffer, Future[None]]] = deque()
        remaining = deque(indices)
        try:
            while remaining or reads:
                while remaining and free and len(reads) <= READ_AHEAD:
                    index, buffer = remaining.popleft(), free.popleft()
                    reads.append((index, buffer, self._threads.submit(self._file.read, index, buffer)))
                if not reads:
                    free.append(_finish(writes))
                    continue
                index, buffer, reading = reads.popleft()
                reading.result()
                if update(index, buffer):
                    writes.append((buffer, self._threads.submit(self._file.write, index, buffer)))
                else:
                    free.append(buffer)
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


def _finish(writes: deque[tuple[PageBuffer, Future[None]]]) -> PageBuffer:
    buffer, writing = writes.popleft()
    writing.result()
    return buffer
