"""How CPU ranks get memory from the system and return it.

glibc's malloc keeps freed blocks between others that are in use, so the memory that level 3 frees after each unit
hardly leaves the process. Told to map large blocks singly, it returns each when it is freed; in huge pages, as the
system clears every page again, at about a microsecond per page of 4 KiB.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.sharding.heap import Heap

# As glibc's malloc.h numbers it.
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 2**20


def give_back_large_blocks() -> None:
    """Have glibc return every freed block of 1 MiB or more to the system at once.

    glibc keeps blocks of up to 32 MiB for reuse as soon as one such has been freed. Units that are gathered and freed
    in turn then leave their memory behind: 1.6 GiB instead of 0.6 measured. Elsewhere than on glibc nothing happens.
    For the whole process; costs the clearing of fresh pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


# By ZeRO level: blocks of at least so many bytes are mapped singly. The smaller, the less stays behind and the slower
# the step: at 256 KiB small activations were mapped and cleared again each time, 30 % of a small model's step. Without
# a value glibc's own rises to 32 MiB: a ResNet-18 at level 0 then took 218 MiB instead of 186, its step as long.
_MAPPED_BYTES = {0: 2**22, 1: 2**22, 2: 2**22, 3: 2**21}
_KEPT_BYTES = 2**24  # free bytes at the end of the heap that stay with the process: it need not grow again every step
_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_OTHER_CHOICES = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_")


def allocator_environment(plan: ShardingPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of a process that trains on the CPU; none where the user has chosen.

    They are read when a process starts. Systems other than glibc ignore them.
    """
    if any(name in environment for name in (*_NAMES, *_OTHER_CHOICES)):
        return {}
    return dict(zip(_NAMES, (str(_MAPPED_BYTES[plan.level]), str(_KEPT_BYTES), "glibc.malloc.hugetlb=1"), strict=True))


def heap_of(plan: ShardingPlan) -> Heap:
    """An empty heap of a rank that vissl-zero starts, with the settings above."""
    return Heap(_MAPPED_BYTES[plan.level], _KEPT_BYTES)


def allocator_advice(plan: ShardingPlan, environment: Mapping[str, str] = os.environ) -> str:
    """The note to print on a CPU rank that another launcher started without these variables; else ""."""
    missing = allocator_environment(plan, environment)
    if not missing:
        return ""
    words = " ".join(f"{name}={value}" for name, value in missing.items())
    return f"Ranks started by vissl-zero itself need less memory. For the same here, start them with: {words}"
