"""Resident memory of a CPU rank: a replay of a recorded step, block by block, on the allocator's heap."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from vissl_zero.planner.heap import Heap
from vissl_zero.planner.step_trace import Moment, StepTrace
from vissl_zero.resolve.resolved import ShardingPlan

_MIB = 2**20
# Bytes in addition to tensors, holes and imported code: measured in plans of twelve recipes on two ranks
# (benchmarks/plan_accuracy.md), and _PROCESS_BYTES in 18 networks too (benchmarks/fit_budgets.md).
_PROCESS_BYTES = 10 * _MIB  # the model's modules, threads, autograd's graph
_SUM_BYTES = 15 * _MIB  # most that gloo takes to sum gradients; for a small model, the bytes of its gradients
_STREAM_BYTES = {1: 3 * _MIB, 2: 3 * _MIB, 3: 9 * _MIB}  # threads that read and write optimizer state, by level
_STORE_BYTES = 7 * _MIB  # threads that read and write parameters
_NUM_STEPS = 3  # the first has no optimizer state yet, and after the third nothing new happens


def process_bytes(plan: ShardingPlan, world_size: int, gradients: Sequence[int]) -> int:
    """Return the resident bytes of a CPU rank in addition to its tensors and the holes between them.

    Args:
        plan: level and tiers.
        world_size: number of ranks.
        gradients: bytes of each gradient.
    """
    total = _PROCESS_BYTES
    if plan.level == 0 and world_size > 1:
        total += min(_SUM_BYTES, sum(gradients))
    if plan.offload_params.is_on_disk:
        total += _STORE_BYTES
    elif plan.offload_optimizer.is_on_disk:
        total += _STREAM_BYTES.get(plan.level, 0)
    return total


class BlockReplay:
    """Allocates and frees the blocks of a step on a heap, in the order of the step.

    Args:
        heap: an empty heap.

    Attributes:
        cleared_bytes: bytes that the system clears and provides in a step.
        num_mapped: number of blocks that are mapped separately in a step.
    """

    def __init__(self, heap: Heap):
        self._heap = heap
        self._live: dict[str, deque[tuple[int, int]]] = defaultdict(deque)  # kind -> number and bytes, oldest first
        self._activations: dict[int, int] = {}  # place among the deltas -> number
        self._handed: tuple[int, int] | None = None
        self.cleared_bytes = self.num_mapped = 0

    @property
    def peak_bytes(self) -> int:
        """Peak of resident bytes so far."""
        return self._heap.peak_bytes

    def keep(self, sizes: Iterable[int]) -> None:
        """Allocate blocks that are never freed."""
        for size in sizes:
            self._heap.allocate(size)

    def run(  # noqa: C901 - one replay, place by place
        self,
        trace: StepTrace,
        changes: Sequence[tuple[int, str, list[int]]],
        spikes: Sequence[tuple[int, int, str]],
        images: int,
        states: Sequence[int],
        temporaries: Sequence[int],
    ) -> None:
        """Replay ``_NUM_STEPS`` steps.

        Args:
            trace: recording of a micro-batch.
            changes: place among its deltas and marks, kind, and bytes of allocated blocks; freed bytes are negative.
            spikes: place, bytes and kind of blocks that are allocated and freed at once.
            images: bytes of a step's images.
            states: bytes of each tensor of optimizer state, which the first update creates.
            temporaries: bytes of each temporary of an update.
        """
        at: dict[int, list[tuple[str, list[int]]]] = defaultdict(list)
        for place, kind, sizes in changes:
            at[place].append((kind, sizes))
        for place, size, kind in spikes:
            if kind not in ("grads", "communication"):  # these are freed later, or not at all
                at[place].append((kind, [size, -size]))
        marks = [mark.place + index for index, mark in enumerate(trace.marks)]
        handed = {  # activations that become a finished gradient
            mark.place - 1
            for mark in trace.marks
            if mark.moment == Moment.GRADIENT and mark.place and trace.deltas[mark.place - 1] == -mark.num_bytes
        }
        last = len(trace.deltas) + len(trace.marks)
        for step in range(_NUM_STEPS):
            cleared, mapped = self._heap.cleared_bytes, self._heap.num_mapped
            loaded = self._heap.allocate(images) if images else None
            index, next_mark = 0, 0
            for place in range(last):
                if next_mark < len(marks) and marks[next_mark] == place:
                    next_mark += 1
                    self._change(at.get(place, ()))
                else:
                    if step == 0 and index in trace.compiled:
                        self.keep([trace.compiled[index]])
                    if index in trace.scratch:  # freed once the kernel has made its outputs
                        self._heap.free(self._heap.allocate(trace.scratch[index]))
                    self._delta(trace, index, index in handed)
                    index += 1
            for place in sorted(place for place in at if place >= last):
                self._change(at[place])
            if step == 0:
                self.keep(states)
            for number in [self._heap.allocate(size) for size in temporaries if size]:
                self._heap.free(number)
            self._end(loaded)
            self.cleared_bytes = self._heap.cleared_bytes - cleared
            self.num_mapped = self._heap.num_mapped - mapped

    def _delta(self, trace: StepTrace, index: int, is_handed: bool) -> None:
        num_bytes = trace.deltas[index]
        if num_bytes > 0:
            self._activations[index] = self._heap.allocate(num_bytes)
            return
        number = self._activations.pop(trace.made[index])
        if is_handed:
            self._handed = number, -num_bytes
        else:
            self._heap.free(number)

    def _change(self, changes: Iterable[tuple[str, list[int]]]) -> None:
        for kind, sizes in changes:
            for size in sizes:
                if size < 0:
                    self._free_oldest(kind, -size)
                elif self._handed is not None and kind == "grads" and self._handed[1] == size:
                    self._live[kind].append(self._handed)
                    self._handed = None
                else:
                    self._live[kind].append((self._heap.allocate(size), size))
        if self._handed is not None:  # sent at once, or added to an earlier gradient
            self._heap.free(self._handed[0])
            self._handed = None

    def _free_oldest(self, kind: str, num_bytes: int) -> None:
        live = self._live[kind]
        while num_bytes > 0 and live:
            number, size = live.popleft()
            self._heap.free(number)
            num_bytes -= size

    def _end(self, loaded: int | None) -> None:
        """Free the gradients and the loop's tensors at the end of a step."""
        for live in self._live.values():
            while live:
                self._heap.free(live.popleft()[0])
        while self._activations:
            self._heap.free(self._activations.popitem()[1])
        if loaded is not None:
            self._heap.free(loaded)
