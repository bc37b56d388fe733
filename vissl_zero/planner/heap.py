"""What glibc's malloc keeps resident: the blocks of a process, replayed one by one.

Blocks above a threshold are mapped separately and returned when freed. Smaller blocks share one heap. There a freed
block stays in the process until it is reused, or until the free bytes at the heap's end exceed a second threshold.
torch asks for 64-byte alignment, for which glibc (before 2.38) searches a hole with room to spare: a block does not fit
into the hole that its equal has left. So the heap grows beyond the bytes in use, and only a replay shows by how much.

Between these blocks lie objects of 16 to 104 bytes that torch makes for each tensor, and that no recording has. While
one of them is in use, the free blocks on both sides of it stay apart. At the peak of a MaxViT's step 397 of 552 MiB of
the heap were free, most of it in holes that ended at such an object.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_PAGE = 4096
_ALIGNMENT = 64
_SPARE = _ALIGNMENT + 32  # what ``memalign`` adds to a request, its smallest chunk included
_HEADER = 16
# Share of the heap that is added for holes that small objects divide: 18 networks took up to a third more than a replay
# without these objects; with 0.25, 2 of 54 took more than their budget, with this none did (benchmarks/fit_budgets.md).
_DIVIDED = 0.3


class Heap:
    """A process's blocks.

    Args:
        mapped_bytes: blocks of at least so many bytes are mapped singly.
        kept_bytes: free bytes at the heap's end that stay.

    Attributes:
        resident_bytes: resident bytes of all blocks, and of the holes between them.
        peak_bytes: the most of it so far, plus the share ``_DIVIDED`` of the heap.
        cleared_bytes: cleared bytes that the system has handed out so far. It clears each page before.
        num_mapped: blocks that were mapped singly so far.
    """

    def __init__(self, mapped_bytes: int, kept_bytes: int):
        self._mapped_bytes, self._kept_bytes = mapped_bytes, kept_bytes
        self._end = 0  # of the heap: what lies below has been touched
        self._top = 0  # where the free bytes at its end begin
        self._mapped = 0
        self._holes: list[tuple[int, int]] = []  # size and start, sorted
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # number -> start (-1: mapped) and size
        self._number = 0
        self.peak_bytes = self.cleared_bytes = self.num_mapped = 0

    @property
    def resident_bytes(self) -> int:
        """See the class."""
        return self._end + self._mapped

    def allocate(self, num_bytes: int) -> int:
        """Allocate a block; return its number, for ``free``."""
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
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + int(self._end * _DIVIDED))
        return self._number

    def free(self, number: int) -> None:
        """Give a block back."""
        start, size = self._blocks.pop(number)
        if start < 0:
            self._mapped -= size
            return
        if start in self._by_end:  # a hole before it
            before = self._by_end[start]
            size += start - before
            self._fill(before)
            start = before
        if start + size in self._by_start:  # and one behind it
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
