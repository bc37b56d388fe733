"""What a process keeps for its blocks, as glibc's malloc gives and takes them."""

from __future__ import annotations

from vissl_zero.planner.heap import Heap
from vissl_zero.planner.resident import BlockReplay
from vissl_zero.planner.step_trace import StepTrace

MIB = 2**20


def test_a_large_block_leaves_and_a_small_one_stays_until_the_end_is_free() -> None:
    heap = Heap(mapped_bytes=4 * MIB, kept_bytes=2 * MIB)
    large = heap.allocate(8 * MIB)
    heap.free(large)
    assert heap.resident_bytes == 0 and heap.peak_bytes == 8 * MIB
    first, second, last = (heap.allocate(MIB) for _ in range(3))
    heap.free(first)
    heap.free(second)
    assert heap.resident_bytes > 3 * MIB, "two holes before a block in use"
    heap.free(last)
    assert heap.resident_bytes == 0, "more than 2 MiB are free at the end"
    assert heap.cleared_bytes == 8 * MIB + 3 * (MIB + 64) and heap.num_mapped == 1


def test_a_block_does_not_fit_into_the_hole_of_its_equal_but_two_holes_become_one() -> None:
    heap = Heap(mapped_bytes=4 * MIB, kept_bytes=MIB // 2)
    first, second, _ = (heap.allocate(MIB) for _ in range(3))
    held = heap.resident_bytes
    heap.free(first)
    third = heap.allocate(MIB)
    assert heap.resident_bytes > held, "64-byte alignment takes room to spare"
    heap.free(second)
    held = heap.resident_bytes
    heap.allocate(2 * MIB - 4096)
    assert heap.resident_bytes == held, "side by side they hold a larger one"
    heap.free(third)
    assert heap.resident_bytes == held - MIB - 64, "the last block ends the heap"


def test_the_block_that_a_step_frees_is_freed_and_not_its_equal() -> None:
    """Which one goes decides where holes are."""

    def peak(freed: int) -> int:
        replay = BlockReplay(Heap(mapped_bytes=4 * MIB, kept_bytes=0))
        trace = StepTrace(deltas=[MIB, MIB, -MIB, MIB], made={2: freed})
        replay.run(trace, [], [], images=0, states=[], temporaries=[])
        return replay.peak_bytes

    assert peak(freed=0) > 3 * MIB, "the hole before a block in use is too small for its equal"
    assert peak(freed=1) < 3 * MIB, "at the end its place is free again"
