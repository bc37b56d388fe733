"""Which allocator settings a rank is started with."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.launch import launcher
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding import allocator
from vissl_zero.sharding.allocator import (
    allocator_advice,
    allocator_environment,
    give_back_large_blocks,
    gpu_allocator_environment,
    return_free_pages,
    set_allocator,
)


def test_a_rank_gets_them_unless_the_user_has_chosen() -> None:
    given = allocator_environment(ShardingPlan(level=3), {"PATH": "/bin"})
    assert set(given) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    assert allocator_environment(ShardingPlan(level=3), given) == {}
    assert allocator_environment(ShardingPlan(level=0), {}).keys() == given.keys()


@pytest.mark.parametrize(("level", "mapped"), [(0, 4), (1, 4), (2, 4), (3, 2)])  # MiB
def test_the_sizes_are_those_that_were_measured(level: int, mapped: int) -> None:
    assert allocator_environment(ShardingPlan(level=level), {}) == {
        "MALLOC_MMAP_THRESHOLD_": str(mapped * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(16 * 2**20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


# Prints whether a block of 3 MiB is mapped singly, and how much of 12 MiB that were freed at the heap's end stays.
_BLOCKS = """
import ctypes
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.allocator import set_allocator
class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b uordblks c keepcost".split()]
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Facts
set_allocator(ShardingPlan(level={level}), {{}})
before = libc.mallinfo2().hblks
block = libc.malloc(3 * 2**20)
is_mapped = libc.mallinfo2().hblks > before
many = [libc.malloc(2**20) for _ in range(12)]
for one in reversed(many):
    libc.free(one)
print(is_mapped, libc.mallinfo2().keepcost >= 11 * 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
@pytest.mark.parametrize(("level", "is_mapped"), [(1, False), (3, True)])
def test_a_process_that_runs_already_gets_them_too(level: int, is_mapped: bool) -> None:
    words = [sys.executable, "-c", _BLOCKS.format(level=level)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed == f"{is_mapped} True\n"


def test_malloc_is_told_what_malloc_h_calls_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """M_TRIM_THRESHOLD is -1 and M_MMAP_THRESHOLD -3; malloc_trim(0) keeps no page at the end of the heap."""
    said: list[tuple[int, ...]] = []
    glibc = SimpleNamespace(mallopt=lambda *words: said.append(words), malloc_trim=lambda *words: said.append(words))
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: glibc))
    set_allocator(ShardingPlan(level=3), {})
    assert said == [(-3, 2 * 2**20), (-1, 16 * 2**20)]
    set_allocator(ShardingPlan(level=3), {"MALLOC_TRIM_THRESHOLD_": "1"})
    give_back_large_blocks()
    return_free_pages()
    assert said[2:] == [(-3, 2**20), (0,)]
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace()))
    set_allocator(ShardingPlan(level=3), {})  # another C library has neither
    return_free_pages()


@pytest.mark.parametrize(
    "name",
    [
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "GLIBC_TUNABLES",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
        "MALLOC_TOP_PAD_",
    ],
)
def test_a_choice_of_the_users_is_left_alone(name: str) -> None:
    assert allocator_environment(ShardingPlan(level=3), {name: "1"}) == {}
    assert allocator_advice(ShardingPlan(level=3), {name: "1"}) == ""


def test_a_rank_of_another_launcher_says_what_to_set() -> None:
    assert "MALLOC_MMAP_THRESHOLD_=4194304" in allocator_advice(ShardingPlan(level=1), {})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_level_3_on_a_gpu_gets_segments_that_grow_unless_the_user_has_chosen(name: str) -> None:
    assert gpu_allocator_environment(ShardingPlan(level=2), {}) == {}
    given = gpu_allocator_environment(ShardingPlan(level=3), {"PATH": "/bin"})
    assert given == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert gpu_allocator_environment(ShardingPlan(level=3), {name: "max_split_size_mb:64"}) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_inherit_the_settings_of_their_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    plan = dataclasses.replace(make_plan(make_config(), "/nowhere"), device=device)
    plan = dataclasses.replace(plan, sharding=ShardingPlan(level=3))
    environment = launcher._environment(plan, None, began=0.0)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == (device == "cuda")
    assert ("MALLOC_MMAP_THRESHOLD_" in environment) == (device == "cpu")
