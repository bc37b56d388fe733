"""How CPU ranks get memory from the system and return it: glibc's malloc, its settings, and what it keeps resident.

glibc's malloc keeps freed blocks between others that are in use, so the memory that level 3 frees after each unit
hardly leaves the process. If told to map each large block separately, glibc returns it when it is freed. The system
must then clear every page again (about a microsecond per 4 KiB page), so huge pages are used.

``Heap`` replays blocks one by one, for forecasts. Blocks above a threshold are mapped separately and returned when
freed. Smaller blocks share one heap. There a freed block stays in the process until it is reused, or until the free
bytes at the heap's end exceed a second threshold. torch asks for 64-byte alignment, for which glibc (before 2.38)
searches a
hole with room to spare: a block does not fit into the hole that its equal has left. So the heap grows beyond the bytes
in use, and only a replay shows by how much.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left, insort
from collections.abc import Mapping

from vissl_zero.resolve.resolved import ShardingPlan

# As glibc's malloc.h numbers it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 2**20


def give_back_large_blocks() -> None:
    """Have glibc return every freed block of 1 MiB or more to the system at once.

    glibc keeps blocks of up to 32 MiB for reuse as soon as one such has been freed. Units that are gathered and freed
    in turn then leave their memory behind: 1.6 GiB instead of 0.6 measured. Without glibc this does nothing. It
    affects the whole process and costs the clearing of fresh pages.
    """
    _set(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_blocks() -> None:
    """Have glibc keep every freed block of up to 32 MiB for reuse, so that nothing is cleared twice.

    It affects the whole process, for good. Elsewhere than on glibc, and where the user has chosen, it does nothing.
    """
    if not any(name in os.environ for name in (*_NAMES, *_OTHER_CHOICES)):
        _set(_M_MMAP_THRESHOLD, 2**25)
        _set(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_free_pages() -> None:
    """Have glibc return the free pages between blocks in use to the system. Without glibc this does nothing.

    Building a model leaves holes: 46 to 89 MiB of them beside a ResNet-34 of 81 MiB. Cost: about a millisecond.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc; elsewhere nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


# By ZeRO level: blocks of at least so many bytes are mapped singly. The smaller, the less stays behind and the slower
# the step: at 256 KiB small activations were mapped and cleared again each time, 30 % of a small model's step. Without
# a value glibc's own rises to 32 MiB: a ResNet-18 at level 0 then took 218 MiB instead of 186, its step as long.
MAPPED_BYTES = {0: 2**22, 1: 2**22, 2: 2**22, 3: 2**21}
_KEPT_BYTES = 2**24  # free bytes at the end of the heap that stay with the process: it need not grow again every step
_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_OTHER_CHOICES = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_")


def allocator_environment(plan: ShardingPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of a process that trains on the CPU; none where the user has chosen.

    They are read when a process starts. Systems other than glibc ignore them.
    """
    if any(name in environment for name in (*_NAMES, *_OTHER_CHOICES)):
        return {}
    return dict(zip(_NAMES, (str(MAPPED_BYTES[plan.level]), str(_KEPT_BYTES), "glibc.malloc.hugetlb=1"), strict=True))


def heap_of(plan: ShardingPlan) -> Heap:
    """An empty heap of a rank that vissl-zero starts, with the settings above."""
    return Heap(MAPPED_BYTES[plan.level], _KEPT_BYTES)


def allocator_advice(plan: ShardingPlan, environment: Mapping[str, str] = os.environ) -> str:
    """The note to print on a CPU rank that another launcher started without these variables; else ""."""
    missing = allocator_environment(plan, environment)
    if not missing:
        return ""
    words = " ".join(f"{name}={value}" for name, value in missing.items())
    return f"Ranks started by vissl-zero itself need less memory. For the same here, start them with: {words}"


_PAGE = 4096
_ALIGNMENT = 64
_SPARE = _ALIGNMENT + 32  # what ``memalign`` adds to a request, its smallest chunk included
_HEADER = 16


class Heap:
    """A process's blocks.

    Args:
        mapped_bytes: blocks of at least so many bytes are mapped singly.
        kept_bytes: free bytes at the heap's end that stay.

    Attributes:
        resident_bytes: of all blocks, and of the holes between them.
        peak_bytes: the most of it so far.
        cleared_bytes: that the system has handed out so far. It clears each page before.
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
        """A block's number, for ``free``."""
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
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
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
        """The smallest hole that is large enough, else the end."""
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
