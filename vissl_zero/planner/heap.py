"""The resident memory of glibc's malloc: a replay of a process's blocks, one by one.

Blocks above a threshold are mapped separately and returned when freed. Smaller blocks share one heap. There a freed
block stays in the process until it is reused, or until the free bytes at the heap's end exceed a second threshold.
torch asks for 64-byte alignment, for which glibc (before 2.38) searches a larger hole: a block does not fit into the
hole that a block of the same size has left. So the heap grows beyond the bytes in use; only a replay shows by how much.

Between these blocks are objects of 16 to 104 bytes, which torch makes for each tensor and no recording contains. While
such an object is in use, the free blocks on both sides of it cannot merge. At the peak of a MaxViT's step, 397 of
552 MiB of the heap were free, most of them in holes that ended at such an object.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_PAGE = 4096
_ALIGNMENT = 64
_SPARE = _ALIGNMENT + 32  # bytes that ``memalign`` adds to a request, its smallest chunk included
_HEADER = 16
# Share of the heap added for holes that small objects divide: 18 networks took up to a third more than a replay
# without these objects. With 0.25, 2 of 54 exceeded their budgets; with 0.3, none did (benchmarks/fit_budgets.md).
DIVIDED = 0.3
# The same in half formats, where the kernels that oneDNN compiles leave twice as many small objects: with 0.3, 1 of 44.
DIVIDED_BY_KERNELS = 0.4


class Heap:
    """A process's blocks.

    Args:
        mapped_bytes: smallest size of blocks that are mapped separately.
        kept_bytes: most free bytes at the heap's end that are not returned to the system.
        divided: share of the heap to add for holes that small objects divide.

    Attributes:
        resident_bytes: bytes of all blocks, and of the holes between them.
        peak_bytes: largest ``resident_bytes`` so far, plus the share ``divided`` of the heap.
        cleared_bytes: bytes that the system has provided so far; it clears each page first.
        num_mapped: number of blocks that were mapped separately so far.
    """

    def __init__(self, mapped_bytes: int, kept_bytes: int, divided: float = DIVIDED):
        self._divided = divided
        self._mapped_bytes, self._kept_bytes = mapped_bytes, kept_bytes
        self._end = 0  # end of the heap; all bytes below it are resident
        self._top = 0  # start of the free bytes at the heap's end
        self._mapped = 0
        self._holes: list[tuple[int, int]] = []  # size and start, sorted
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # number -> start (-1: mapped) and size
        self._number = 0
        self.peak_bytes = self.cleared_bytes = self.num_mapped = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of all blocks, and of the holes between them."""
        return self._end + self._mapped

    def allocate(self, num_bytes: int) -> int:
        """Allocate a block and return the number by which ``free`` knows it."""
        self._number += 1
        if num_bytes >= self._mapped_bytes:
            size = -(-num_bytes // _PAGE) * _PAGE
            self._mapped += size
            self.cleared_bytes += size
            self.num_mapped += 1
            self._blocks[self._number] = -1, size
        else:
            size = -(-(num_bytes + _HEADER) // _ALIGNMENT) * _ALIGNMENT
            self._blocks[self._number] = self._place(size), size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + int(self._end * self._divided))
        return self._number

    def free(self, number: int) -> None:
        """Free the block that ``allocate`` returned as ``number``."""
        start, size = self._blocks.pop(number)
        if start < 0:
            self._mapped -= size
            return
        if start in self._by_end:  # a hole before it
            before = self._by_end[start]
            size += start - before
            self._fill(before)
            start = before
        if start + size in self._by_start:  # a hole behind it
            behind = start + size
            size += self._by_start[behind]
            self._fill(behind)
        if start + size < self._top:
            self._dig(start, size)
            return
        self._top = start
        if self._end - self._top > self._kept_bytes:
            self._end = self._top

    def _place(self, size: int) -> int:
        """Place a block in the smallest hole that is large enough, else at the end."""
        index = bisect_left(self._holes, (size + _SPARE, 0))
        if index < len(self._holes):
            room, start = self._holes[index]
            self._fill(start)
            if room > size:
                self._dig(start + size, room - size)
            return start
        start, self._top = self._top, self._top + size
        self.cleared_bytes += max(0, self._top - self._end)
        self._end = max(self._end, self._top)
        return start

    def _dig(self, start: int, size: int) -> None:
        insort(self._holes, (size, start))
        self._by_start[start], self._by_end[start + size] = size, start

    def _fill(self, start: int) -> None:
        size = self._by_start.pop(start)
        del self._by_end[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
