"""How CPU ranks get memory from the system and give it back.

glibc's malloc keeps large blocks that are freed between others that are not, so that what level 3 frees after each
unit hardly leaves the process. Told to map large blocks singly, it returns each when it is freed; in huge pages, as the
system clears every page anew, and a page of 4 KiB costs about a microsecond.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

LARGE_BYTES = 4 * 2**20

_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(LARGE_BYTES),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_OTHER_ALLOCATORS = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_")


def allocator_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of a process that trains on the CPU; none where the user has chosen.

    They are read when a process starts. Systems other than glibc ignore them.
    """
    if any(name in environment for name in (*_VARIABLES, *_OTHER_ALLOCATORS)):
        return {}
    return dict(_VARIABLES)


def allocator_advice(environment: Mapping[str, str] = os.environ) -> str:
    """What to say in a CPU rank that another launcher has started without these variables; or nothing."""
    missing = allocator_environment(environment)
    if not missing:
        return ""
    words = " ".join(f"{name}={value}" for name, value in missing.items())
    return f"Ranks started by vissl-zero itself need less memory. For the same here, start them with: {words}"
