"""Memory of ranks: the settings of glibc's malloc on the CPU, and of torch's allocator on a GPU.

glibc's malloc keeps freed blocks between others that are in use, so the memory that level 3 frees after each unit
hardly leaves the process. If told to map each large block separately, glibc returns it when it is freed. The system
must then clear every page again (about a microsecond per 4 KiB page), so huge pages are used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from vissl_zero.resolve.resolved import ShardingPlan

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**20


def give_back_large_blocks() -> None:
    """Make glibc return every freed block of 1 MiB or more to the system at once.

    glibc keeps blocks of up to 32 MiB for reuse once a block of that size has been freed. Units that are gathered and
    freed in turn then leave their memory with the process: 1.6 GiB instead of 0.6 measured. Without glibc this does
    nothing. It affects the whole process, and costs the clearing of fresh pages.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_pages() -> None:
    """Make glibc return the free pages between blocks in use to the system. Without glibc this does nothing.

    Building a model leaves holes: 46 to 89 MiB for a ResNet-34 of 81 MiB. Cost: about a millisecond.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc. Without glibc this does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


# By ZeRO level: blocks of at least this many bytes are mapped one by one. A smaller threshold leaves less memory
# behind, and slows the step: at 256 KiB, mapping and clearing small activations took 30 % of a small model's step.
# Without a threshold, glibc raises its own to 32 MiB: a ResNet-18 at level 0 then took 218 MiB instead of 186, in the
# same time.
MAPPED_BYTES = {0: 2**22, 1: 2**22, 2: 2**22, 3: 2**21}
KEPT_BYTES = 2**24  # free bytes at the end of the heap that stay with the process: it need not grow again every step
_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_OTHER_CHOICES = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_")


def allocator_environment(plan: ShardingPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for a process that trains on the CPU; none if the user has set any of them.

    glibc reads them when a process starts; other libraries ignore them.
    """
    if any(name in environment for name in (*_NAMES, *_OTHER_CHOICES)):
        return {}
    return dict(zip(_NAMES, (str(MAPPED_BYTES[plan.level]), str(KEPT_BYTES), "glibc.malloc.hugetlb=1"), strict=True))


# Both names of the variable: newer versions of torch prefer the second and still accept the first.
_GPU_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def gpu_allocator_environment(plan: ShardingPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for a process that trains on a GPU; none below level 3, or if the user has set one.

    Level 3 gathers and frees units of many sizes, and blocks of fixed size would leave gaps between them. Segments that
    grow do not. torch reads the variable when CUDA starts.
    """
    if plan.level < 3 or any(name in environment for name in _GPU_NAMES):
        return {}
    return {_GPU_NAMES[0]: "expandable_segments:True"}


def set_allocator(plan: ShardingPlan, environment: Mapping[str, str] = os.environ) -> None:
    """Give this process the settings of a rank that vissl-zero starts, unless the user has set variables for them.

    Huge pages are left out: glibc reads that setting only when a process starts.
    """
    if allocator_environment(plan, environment):
        _set(_M_MMAP_THRESHOLD, MAPPED_BYTES[plan.level])
        _set(_M_TRIM_THRESHOLD, KEPT_BYTES)


def allocator_advice(plan: ShardingPlan, environment: Mapping[str, str] = os.environ) -> str:
    """Return the note for a CPU rank that another launcher started without these variables; else ""."""
    missing = allocator_environment(plan, environment)
    if not missing:
        return ""
    words = " ".join(f"{name}={value}" for name, value in missing.items())
    return f"Ranks started by vissl-zero itself need less memory. For the same here, start them with: {words}"
