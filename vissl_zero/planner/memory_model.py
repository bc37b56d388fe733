"""The forecast of memory: the bytes of a rank at every moment of a step, by kind, at any level and tier.

A recorded micro-batch (``step_trace.py``) has the moments when activations and gradients are allocated and freed. This
file adds what a level does at these moments: which units are gathered, when gradients are sent, which buffers
communication and offload keep. The dry run, ``plan``, ``fit`` and the out-of-memory advice all use it. Nothing here
runs a model or needs a process group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vissl_zero.planner.heap import DIVIDED, DIVIDED_BY_KERNELS, Heap
from vissl_zero.planner.resident import BlockReplay, process_bytes
from vissl_zero.planner.step_trace import Mark, Moment, StepTrace
from vissl_zero.resolve.resolved import ShardingPlan, keeps_parameters_whole, shards_parameters
from vissl_zero.sharding.allocator import KEPT_BYTES, MAPPED_BYTES
from vissl_zero.sharding.engines.cpu_communicator import MAX_BACKLOG_BYTES, SLOT_BYTES, CpuCommunicator
from vissl_zero.sharding.engines.gradient_average import BUCKET_BYTES
from vissl_zero.sharding.model.precision import dtype_of
from vissl_zero.sharding.offload.block_file import HUGE_PAGE, NUM_BUFFERS, NUM_TRAYS, pages
from vissl_zero.sharding.offload.layout import CHUNK_ELEMENTS
from vissl_zero.sharding.offload.streamed_optimizer import RECORD_BYTES
from vissl_zero.sharding.param_facts import ParamFacts, params_on_disk, share_of, whole_units
from vissl_zero.sharding.update.whole_tensors import ROUND_ELEMENTS

KINDS = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "inputs",
    "buffers",
    "teacher",
    "communication",
    "offload_buffers",
)
_POINTS = 400  # most points of a drawn timeline
# Share that is added to each forecast: on a GPU for fragments of the allocator, on a CPU for the most by which twelve
# recipes exceeded their forecasts (benchmarks/plan_accuracy.md).
MARGIN = 0.05


@dataclass(frozen=True)
class UpdateFacts:
    """The memory of one rank's optimizer step.

    Attributes:
        state_bytes: bytes of optimizer state between steps.
        num_state_keys: state tensors per parameter.
        temporary_bytes: peak bytes of temporaries during the step.
        whole_bytes, largest_bytes: bytes of this rank's full tensors, and of the largest of them; 0 for an optimizer
            that needs no full tensors.
    """

    state_bytes: int
    num_state_keys: int
    temporary_bytes: int
    whole_bytes: int = 0
    largest_bytes: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model's memory that do not depend on the level.

    Attributes:
        params: parameters of the model, by full name, in the order of the model.
        buffer_bytes: bytes of the buffers of model (running statistics and others) and loss.
        average_buffer_bytes: bytes of the buffers of a running average of the weights; 0 without an average.
        is_averaged: whether the run keeps a running average of the weights.
        teacher: parameters of the teacher, by full name; empty without a teacher.
        teacher_buffer_bytes: bytes of the teacher's buffers.
        updates: facts of the optimizer step, by the number of ranks that share a copy of the state.
    """

    params: Mapping[str, ParamFacts]
    buffer_bytes: int
    average_buffer_bytes: int = 0
    is_averaged: bool = False
    teacher: Mapping[str, ParamFacts] = field(default_factory=dict)
    teacher_buffer_bytes: int = 0
    updates: Mapping[int, UpdateFacts] = field(default_factory=dict)


class _Pool(NamedTuple):
    """Buffers in one allocation (``offload/block_file.py``).

    Attributes:
        num_bytes: bytes of a buffer.
        number: number of buffers.
        num_written: number of buffers that are ever written; the others take no memory. None: all.
    """

    num_bytes: int
    number: int
    num_written: int | None = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of whole huge pages, and of one more for alignment."""
        return _huge_pages(self.number * self.num_bytes) + HUGE_PAGE

    @property
    def resident_bytes(self) -> int:
        """Bytes that are resident."""
        return _huge_pages((self.number if self.num_written is None else self.num_written) * self.num_bytes)


def _huge_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


@dataclass(frozen=True)
class StepMemory:
    """The forecast of a step on the rank that needs most memory.

    Attributes:
        peak_bytes: peak bytes of all tensors on the rank's device.
        resident_bytes: bytes that the rank needs for them, with ``MARGIN``. On a CPU, these are the peak bytes of the
            process without those before the model was built: holes between blocks, kernels and libraries add to
            tensors. On a GPU, they are ``peak_bytes``.
        cleared_bytes: fresh bytes of a step, which the system clears before it provides them; 0 on a GPU, where torch
            keeps its memory.
        num_mapped: number of fresh blocks that are mapped separately.
        by_kind: bytes at the peak; see ``KINDS``.
        phase: phase of the peak: "teacher", "forward", "backward" or "update".
        unit: name of the last unit entered before the peak; empty for the model itself.
        host_bytes: bytes in host memory in addition, if the rank computes on a GPU; 0 on the CPU.
        disk_bytes: bytes on a disk.
        timeline: bytes of each kind at up to ``_POINTS`` moments, each the peak of an interval.
        phases: phase of each of these moments.
    """

    peak_bytes: int
    resident_bytes: int
    cleared_bytes: int
    num_mapped: int
    by_kind: dict[str, int]
    phase: str
    unit: str
    host_bytes: int
    disk_bytes: int
    timeline: dict[str, list[int]]
    phases: list[str]


def step_memory(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    device_type: str,
    *,
    num_nodes: int = 1,
    micro_batches: int = 1,
) -> StepMemory:
    """Forecast the last micro-batch of a step, and its update; earlier micro-batches need no more memory.

    Args:
        trace: recording of a micro-batch under ``plan`` (recomputation, number formats).
        facts: facts of the model.
        plan: level, tiers and shard group.
        world_size: number of ranks.
        device_type: "cpu" or "cuda".
        num_nodes: number of machines.
        micro_batches: micro-batches of a step.
    """
    step = _Step(trace, facts, plan, world_size, device_type, num_nodes, micro_batches)
    step.run()
    return step.result()


@dataclass
class _Step:
    """The computation of ``step_memory``: a level's changes in bytes, at places of the recording's timeline."""

    trace: StepTrace
    facts: ModelFacts
    plan: ShardingPlan
    world_size: int
    device_type: str
    num_nodes: int
    micro_batches: int

    def __post_init__(self) -> None:
        plan, facts = self.plan, self.facts
        self.num_ranks = num_ranks = plan.ranks_per_copy(self.world_size)
        self.is_whole = keeps_parameters_whole(plan, num_ranks, self.world_size, self.device_type)
        self.has_shards = shards_parameters(plan, num_ranks, self.world_size, self.device_type)
        self.trained = {name: param for name, param in facts.params.items() if param.is_trained}
        self.stored = params_on_disk(facts.params, plan, num_ranks)
        self.stored_teacher = params_on_disk(facts.teacher, plan, num_ranks)
        self.units: dict[str, list[str]] = {}
        for name, param in facts.params.items():
            if not param.is_replicated:
                self.units.setdefault(param.unit, []).append(name)
        self.whole = whole_units(facts.params, num_ranks)  # bytes of gathered units in the master format
        self.compute_share = share_of(plan.precision.compute, plan)
        self.reduce_share = share_of(plan.precision.reduce, plan)
        self.changes: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
        self.spikes: list[tuple[int, int, str]] = []  # place, bytes at this place alone, kind
        self.gathered: set[str] = set()
        self.gathered_of_teacher: set[str] = set()
        self.pending: dict[str, int] = {}
        self.finished: set[str] = set()  # parameters whose gradients are complete
        self.unsent = deque(self.buckets())
        self.num_messages = 0  # sent so far, with finished gradients
        self.message = 0  # bytes of the last message of a unit
        self.waiting: deque[int] = deque()  # bytes of gradients that wait because another rank is behind
        self.widened = 0  # bytes by which buckets in a wider format exceed the gradients in them
        self.place = 0
        self.blocks: list[tuple[int, str, list[int]]] = []  # place, kind, bytes of each; negative: freed bytes

    # -- what is there throughout ------------------------------------------------------------------------------

    def constants(self) -> Iterator[tuple[str, int]]:
        """Yield kind and bytes of memory that is there throughout a step."""
        plan, facts = self.plan, self.facts
        update = facts.updates[self.num_ranks]
        state = update.state_bytes
        yield "params", self.on_device(facts.params, self.stored)
        yield "teacher", self.on_device(facts.teacher, self.stored_teacher) + facts.teacher_buffer_bytes
        yield "buffers", facts.buffer_bytes + facts.average_buffer_bytes
        if facts.is_averaged:
            yield "buffers", sum(self.part(param) for param in facts.params.values())
        yield "inputs", self.trace.input_bytes * self.micro_batches
        if plan.offload_optimizer.place(self.device_type) == "device":
            yield "optimizer", state
        if self.is_whole:
            yield "grads", sum(param.padded(self.num_ranks) for param in self.trained.values())
        yield from self.communication()
        yield "offload_buffers", sum(pool.mapped_bytes for pool in self.offload_pools())

    def part(self, param: ParamFacts) -> int:
        """Return the bytes of a parameter's shard; at level 0, of the parameter."""
        return param.padded(self.num_ranks) if self.plan.level else param.num_bytes

    def held(self, params: Mapping[str, ParamFacts], stored: Mapping[str, ParamFacts]) -> list[int]:
        """List the bytes of each parameter in a rank's memory between units; ``stored`` parameters are on a disk."""
        held = (param for name, param in params.items() if name not in stored)
        return [self.part(param) if self.has_shards else param.num_bytes for param in held]

    def on_device(self, params: Mapping[str, ParamFacts], stored: Mapping[str, ParamFacts]) -> int:
        """Sum the bytes of parameters on a rank's device between units. Replicated parameters are always there."""
        if self.device_type == "cpu" or self.plan.offload_params.place(self.device_type) == "device":
            return sum(self.held(params, stored))
        return sum(param.num_bytes for param in params.values() if param.is_replicated)

    def communication(self) -> Iterator[tuple[str, int]]:
        """Yield kind and bytes of communication buffers. On a CPU, their size is fixed; nccl's are not counted."""
        # If parameters are whole, even a single rank has these buffers.
        if self.device_type != "cpu" or (self.num_ranks == 1 and not self.is_whole):
            return
        slots = 2 * CpuCommunicator.LAG * SLOT_BYTES
        # In shared memory, a rank maps the slots of all ranks. Over a network, it has slots to send, and slots to
        # receive from every rank.
        per_exchange = slots * self.num_ranks if self.num_nodes == 1 else slots * (self.num_ranks + 1)
        yield "communication", per_exchange
        if self.is_whole:  # zeros, for parameters without gradients
            itemsize = dtype_of(self.plan.precision.master).itemsize
            yield "communication", (SLOT_BYTES // itemsize // self.num_ranks) * itemsize
        if self.has_shards:
            # The teacher is a sharded model of its own, with a communicator of its own.
            if self.facts.teacher:
                yield "communication", per_exchange
            largest = max((self.whole[unit] for unit in self.units), default=0)
            # A set: there is one buffer for each number format, used for gathering and for reducing.
            shares = {self.compute_share, self.reduce_share}
            yield "communication", int(sum(largest * share for share in shares)) + self.packed()
            if self.facts.teacher and not self.plan.offload_params.is_on_disk:
                yield "communication", int(largest * self.compute_share) + self.packed()

    def packed(self) -> int:
        """Return the bytes of all ranks' messages of the largest unit that has weights in float8."""
        if self.plan.level < 3:
            return 0
        units = [[self.facts.params[name] for name in names] for names in self.units.values()]
        sizes = (
            sum(param.sent(self.num_ranks, self.compute_share) for param in unit)
            for unit in units
            if any(param.is_float8 for param in unit)
        )
        return int(max(sizes, default=0)) * self.num_ranks

    @property
    def keeps_buffer(self) -> bool:
        """Return whether gathers and reductions use a permanent buffer, which ``communication`` counts."""
        return self.device_type == "cpu" and self.num_ranks > 1

    @property
    def is_streamed(self) -> bool:
        """Whether the update passes through buffers (``offload/tier.py``)."""
        has_state = self.facts.updates[self.num_ranks].num_state_keys > 0
        return self.plan.offload_params.is_on_disk or (self.plan.offload_optimizer.is_on_disk and has_state)

    @property
    def takes_temporaries(self) -> bool:
        """Whether the base optimizer updates everything at once on the device."""
        return not self.is_streamed and self.plan.offload_optimizer.place(self.device_type) != "host"

    def offload_pools(self) -> Iterator[_Pool]:
        """Yield the pools of buffers between memory and a disk."""
        value = 0
        if self.plan.offload_params.is_on_disk:
            # The teacher is a sharded model of its own, with buffers of its own.
            for params in (*([self.stored_teacher] if self.facts.teacher else []), self.stored):
                value = pages(self.value_record(params))
                yield _Pool(value, NUM_BUFFERS)
                # At most as many buffers are written as the largest unit has records.
                most = -(-self.largest_stored(params) // self.chunk_bytes)
                yield _Pool(value, NUM_TRAYS, min(NUM_TRAYS, most))
        state = pages(self.state_record()) if self.plan.offload_optimizer.is_on_disk else 0
        is_whole = self.facts.updates[self.num_ranks].whole_bytes > 0  # it moves values and gradients itself
        if self.is_streamed:
            yield _Pool(state + 2 * value * (not is_whole), NUM_TRAYS)

    def largest_stored(self, params: Mapping[str, ParamFacts]) -> int:
        """Return the most bytes that a unit's trained, or its frozen, parameters have on a disk."""
        groups: dict[tuple[str, bool], int] = {}
        for param in params.values():
            group = param.unit, param.is_trained
            groups[group] = groups.get(group, 0) + self.part(param)
        return max(groups.values(), default=0)

    @property
    def chunk_bytes(self) -> int:
        """Largest possible bytes of a record of parameters on a disk."""
        return CHUNK_ELEMENTS * dtype_of(self.plan.precision.master).itemsize

    def value_record(self, params: Mapping[str, ParamFacts]) -> int:
        """Return the bytes of the largest record of parameters on a disk."""
        return min(self.chunk_bytes, self.largest_stored(params))

    def state_record(self) -> int:
        """Return the size of the largest record of optimizer state on a disk, in bytes."""
        update = self.facts.updates[self.num_ranks]
        keys = update.num_state_keys
        if update.whole_bytes:
            return min(RECORD_BYTES, -(-update.state_bytes // update.whole_bytes) * update.largest_bytes)
        if self.plan.offload_params.is_on_disk:  # one record of state for each record of parameters
            return keys * self.value_record(self.stored)
        return min(RECORD_BYTES, keys * sum(map(self.part, self.trained.values())))

    # -- what changes --------------------------------------------------------------------------------------------

    def change(self, kind: str, *blocks: int) -> None:
        """Record blocks allocated at the current place, by their bytes, or a negative number of freed bytes."""
        if num_bytes := sum(blocks):
            self.changes[kind].append((self.place, num_bytes))
            self.blocks.append((self.place, kind, [size for size in blocks if size]))

    def gather(self, unit: str, gathered: set[str], kind: str) -> None:
        """Gather a unit's parameters."""
        if self.has_shards and unit in self.units and unit not in gathered:
            gathered.add(unit)
            params = (self.facts.params[name] for name in self.units[unit])
            self.change(kind, *(int(p.padded(self.num_ranks) * self.num_ranks * self.compute_share) for p in params))
            if self.plan.offload_params.is_on_disk:  # the unit's shards, and a buffer unless it is permanent
                read = sum(self.part(self.stored[name]) for name in self.units[unit] if name in self.stored)
                buffer = 0 if self.keeps_buffer and kind == "params" else self.whole[unit] * self.compute_share
                self.spikes.append((self.place, read + int(buffer), kind))
            elif self.device_type == "cuda":  # the buffer that receives the unit
                self.spikes.append((self.place, int(self.whole[unit] * self.compute_share), "communication"))

    def free(self, unit: str, gathered: set[str], kind: str) -> None:
        """Free a unit's full parameters."""
        if unit in gathered:
            gathered.remove(unit)
            self.change(kind, -int(self.whole[unit] * self.compute_share))

    def begin(self) -> None:
        """Add the gradients of earlier micro-batches."""
        if self.micro_batches == 1:
            return
        if self.plan.level == 0 or (self.plan.level == 1 and not self.plan.deterministic):
            self.change("grads", *(param.num_bytes for param in self.trained.values()))
        elif self.has_shards:
            self.change("grads", *(self.part(param) for name, param in self.trained.items() if name not in self.stored))

    def run(self) -> None:
        """Record the changes of all marks."""
        self.begin()
        for index, mark in enumerate(self.trace.marks):
            # Each mark has its own place among the deltas; result() shifts the deltas accordingly.
            self.place = mark.place + index
            self.take(mark)
        self.place = len(self.trace.deltas) + len(self.trace.marks)
        if self.waiting:
            self.place += 1
            self.change("grads", -sum(self.waiting))
        if self.widened:  # all buckets stay until the last is cast back
            self.spikes.append((self.place, sum(param.num_bytes for param in self.trained.values()), "grads"))
            self.place += 1
            self.change("grads", -self.widened)
        if self.has_shards:
            # If a unit's inputs need no gradient, its backward pass has no end mark; torch reduces it after the pass.
            for unit in [*self.pending]:
                self.place += 1
                self.reduce(unit)
            for unit in [*self.gathered]:
                self.free(unit, self.gathered, "params")
        self.place += 1
        self.change("communication", -self.message)

    def take(self, mark: Mark) -> None:
        """Record the changes of one mark."""
        moment, name = mark.moment, mark.name
        if moment in (Moment.FORWARD_IN, Moment.BACKWARD_IN):
            self.gather(name, self.gathered, "params")
        elif moment == Moment.FORWARD_OUT and self.plan.level == 3:
            self.free(name, self.gathered, "params")
        elif moment == Moment.BACKWARD_OUT and self.has_shards:
            self.reduce(name)
            self.free(name, self.gathered, "params")
        elif moment == Moment.TEACHER_IN:
            self.gather(name, self.gathered_of_teacher, "teacher")
        elif moment == Moment.TEACHER_OUT and self.plan.level == 3:
            self.free(name, self.gathered_of_teacher, "teacher")
        elif moment == Moment.GRADIENT:
            self.gradient(name, mark.num_bytes)

    def gradient(self, name: str, num_bytes: int) -> None:
        """Count a finished gradient: it stays, is sent, or waits for its unit."""
        param = self.facts.params[name]
        has_earlier = self.micro_batches > 1
        if self.has_shards:
            self.change("grads", num_bytes)
            if not param.is_replicated:
                self.pending[param.unit] = self.pending.get(param.unit, 0) + num_bytes
            return
        # At levels 0 and 1, it was an activation until it was added to the gradient of earlier micro-batches.
        if not (has_earlier and self.plan.level < 2):
            self.change("grads", num_bytes)
        self.finished.add(name)
        while self.unsent and self.finished.issuperset(self.unsent[0]):  # buckets are sent in order
            bucket = self.unsent.popleft()
            total = sum(self.facts.params[done].num_bytes for done in bucket)
            if self.is_whole:
                self.num_messages += 1
                self.waiting.append(total)
                # The first messages of a round find free slots; one slot is taken by the announcement of the round.
                most = 0 if self.num_messages < CpuCommunicator.LAG else MAX_BACKLOG_BYTES
                while sum(self.waiting) > most:
                    self.change("grads", -self.waiting.popleft())
            else:
                sent = int(total * self.reduce_share)
                self.spikes.append((self.place, sent, "communication"))
                self.blocks.append((self.place, "grads", [sent, -total]))  # the bucket replaces its gradients
                self.changes["grads"].append((self.place, sent - total))
                self.widened += sent - total

    def buckets(self) -> Iterator[Sequence[str]]:
        """Yield the names of gradients that are sent together, in the order of sending."""
        if self.has_shards or self.world_size == 1:
            return
        names = [*self.trained][::-1]
        if self.is_whole:
            yield from self.messages(names)
            return
        bucket: list[str] = []
        num_bytes = 0
        for name in names:
            param = self.trained[name]
            if bucket and num_bytes + param.num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(name)
            num_bytes += param.num_bytes
        if bucket:
            yield bucket

    def messages(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield, for each message of ``plan_messages``, the parameters whose gradients it completes."""
        itemsize = dtype_of(self.plan.precision.master).itemsize
        capacity = SLOT_BYTES // itemsize // self.num_ranks
        ended: list[str] = []
        room = capacity
        for name in names:
            rest = self.trained[name].padded(self.num_ranks) // itemsize
            while rest:
                if rest > room - 1 and room < capacity:  # a cut parameter begins a message
                    yield ended
                    ended, room = [], capacity
                sent = min(rest, room - 1)  # a flag goes with each piece
                room -= sent + 1
                rest -= sent
            ended.append(name)
        yield ended

    def reduce(self, unit: str) -> None:
        """Reduce a unit's gradients to this rank's shard of their mean."""
        whole = self.pending.pop(unit, 0)
        if not whole:
            return
        params = {name: self.facts.params[name] for name in self.units.get(unit, ()) if name in self.trained}
        moved = self.shards({name: param for name, param in params.items() if name in self.stored})
        self.change("grads", -whole)
        mean = int(self.shards(params) * self.reduce_share)
        message = 0 if self.keeps_buffer else mean * self.num_ranks
        # torch frees the gradients of a unit after it has copied them into the message, and then allocates their mean.
        # A message stays until the next, unless gradients go to a disk.
        self.spikes.append((self.place, max(whole - mean, 0) if message and not moved else whole, "grads"))
        if message and not moved:
            self.change("communication", -self.message)
            self.change("communication", message)
            self.message = message
        if self.reduce_share != 1:  # the mean, before it is cast to the parameters' format
            self.spikes.append((self.place, mean, "grads"))
        if moved:
            self.spikes.append((self.place, moved + message, "grads"))
        if self.micro_batches == 1:
            # With more micro-batches, begin() has counted the shards; later gradients are added to them.
            self.change("grads", *(self.part(param) for name, param in params.items() if name not in self.stored))

    # -- sums ----------------------------------------------------------------------------------------------------

    def result(self) -> StepMemory:
        """Sum all changes, and find the peak."""
        trace, length = self.trace, self.place + 1
        series = {kind: torch.zeros(length, dtype=torch.int64) for kind in KINDS}
        places = torch.tensor([mark.place for mark in trace.marks], dtype=torch.int64)
        numbers = torch.arange(len(trace.deltas))
        merged = numbers + torch.searchsorted(places, numbers, right=True)
        series["activations"][merged] = torch.tensor(trace.deltas, dtype=torch.int64)
        for kind, changes in self.changes.items():
            if changes:
                at, sizes = (torch.tensor(column) for column in zip(*changes, strict=True))
                series[kind].index_add_(0, at.clamp(max=length - 1), sizes)
            if changes or kind == "activations":
                series[kind].cumsum_(0)
        for kind, num_bytes in self.constants():
            if num_bytes:
                series[kind] += num_bytes
        for place, num_bytes, kind in self.spikes:
            series[kind][min(place, length - 1)] += num_bytes
        update = self.facts.updates[self.num_ranks]
        # A streamed update uses buffers that are counted already; an update on the host takes no device memory.
        if self.takes_temporaries:
            series["optimizer"][-1] += update.temporary_bytes
        series["optimizer"][-1] += self.whole_tensors()
        total = torch.zeros(length, dtype=torch.int64)
        for values in series.values():
            total += values
        peak = int(total.argmax())
        drawn = _drawn(total)
        (phase, unit), *phases = self.phases([peak, *drawn], length - 1)
        host, disk = self.off_device_bytes()
        resident, cleared, mapped = self.resident() if self.device_type == "cpu" else (int(total[peak]), 0, 0)
        resident += int(resident * MARGIN)
        return StepMemory(
            peak_bytes=int(total[peak]),
            resident_bytes=resident,
            cleared_bytes=cleared,
            num_mapped=mapped,
            by_kind={kind: int(values[peak]) for kind, values in series.items()},
            phase=phase,
            unit=unit,
            host_bytes=host,
            disk_bytes=disk,
            timeline={kind: values[drawn].tolist() for kind, values in series.items()},
            phases=[name for name, _ in phases],
        )

    def resident(self) -> tuple[int, int, int]:
        """Replay all blocks on a CPU rank's heap. Return peak bytes, and cleared bytes and large blocks of a step."""
        facts, update = self.facts, self.facts.updates[self.num_ranks]
        divided = DIVIDED_BY_KERNELS if self.trace.compiled else DIVIDED
        constants: dict[str, int] = {}
        for kind, num_bytes in self.constants():
            constants[kind] = constants.get(kind, 0) + num_bytes
        replay = BlockReplay(Heap(MAPPED_BYTES[self.plan.level], KEPT_BYTES, divided))
        for kind, params, stored in (
            ("params", facts.params, self.stored),
            ("teacher", facts.teacher, self.stored_teacher),
        ):
            constants[kind] -= self.on_device(params, stored)
            replay.keep(self.held(params, stored))
        if self.is_whole:
            replay.keep(param.padded(self.num_ranks) for param in self.trained.values())
            constants.pop("grads", 0)
        constants["offload_buffers"] = sum(pool.resident_bytes for pool in self.offload_pools())
        images, state = constants.pop("inputs", 0), constants.pop("optimizer", 0)
        parts = [self.part(param) for param in self.trained.values()]
        share = state / max(1, sum(parts) * update.num_state_keys)
        states = [int(size * share) for size in parts for _ in range(update.num_state_keys)] if state else []
        temporary = update.temporary_bytes if self.takes_temporaries else 0
        replay.run(self.trace, self.blocks, self.spikes, images, states, [temporary, self.whole_tensors()])
        gradients = [param.num_bytes for param in self.trained.values()]
        others = sum(constants.values()) + process_bytes(self.plan, self.world_size, gradients)
        return replay.peak_bytes + others, replay.cleared_bytes, replay.num_mapped

    def phases(self, places: Sequence[int], last: int) -> list[tuple[str, str]]:
        """Return the phase of each place, and the last unit entered before it. ``last`` is the place of the update."""
        begins, entered = [0], [("forward", "")]
        for index, mark in enumerate(self.trace.marks):
            phase, unit = entered[-1]
            if mark.moment == Moment.TEACHER_IN:
                phase, unit = "teacher", mark.name
            elif mark.moment == Moment.FORWARD_IN and phase != "backward":
                # In the backward pass, FORWARD_IN marks a recomputation, which belongs to the phase "backward".
                phase, unit = "forward", mark.name
            elif mark.moment == Moment.LOSS:
                phase, unit = "backward", ""
            elif mark.moment in (Moment.BACKWARD_IN, Moment.FORWARD_IN):
                unit = mark.name
            begins.append(mark.place + index)
            entered.append((phase, unit))
        phases = [entered[bisect_right(begins, place) - 1] for place in places]
        return [("update", "") if place == last else one for place, one in zip(places, phases, strict=True)]

    def whole_tensors(self) -> int:
        """Return the bytes of full tensors during an update, and of their messages."""
        update = self.facts.updates[self.num_ranks]
        if not (self.plan.level and update.whole_bytes):
            return 0
        # Gradients, and values unless all ranks hold them: each as a received message and as a tensor.
        copies = 3 if self.is_whole else 4
        if not (self.plan.offload_optimizer.is_on_disk or self.plan.offload_params.is_on_disk):
            return copies * update.whole_bytes
        of_round = ROUND_ELEMENTS * dtype_of(self.plan.precision.master).itemsize
        at_once = min(max(update.largest_bytes, of_round), update.whole_bytes)
        if self.plan.offload_optimizer.is_on_disk:  # the state too is in memory only for the update
            copies += -(-update.state_bytes // update.whole_bytes)
        return copies * at_once

    def shards(self, params: Mapping[str, ParamFacts]) -> int:
        """Sum the bytes of the shards on a shard group's first rank."""
        return sum(param.padded(self.num_ranks) for param in params.values())

    def off_device_bytes(self) -> tuple[int, int]:
        """Return the bytes in host memory if the rank computes on a GPU, and the bytes on a disk."""
        plan, host, disk = self.plan, 0, 0
        everything = sum(self.shards(params) for params in (self.facts.params, self.trained, self.facts.teacher))
        stored_grads = {name: param for name, param in self.stored.items() if param.is_trained}
        stored = sum(self.shards(params) for params in (self.stored, stored_grads, self.stored_teacher))
        state = self.facts.updates[self.num_ranks].state_bytes
        optimizer, params = (tier.place(self.device_type) for tier in (plan.offload_optimizer, plan.offload_params))
        if optimizer == "disk":
            disk += state
        elif optimizer == "host":
            host += state
        if params == "disk":
            disk += stored
            host += everything - stored if self.device_type == "cuda" else 0
        elif params == "host":
            host += everything
        elif optimizer != "device" and self.device_type == "cuda":  # copies for the update; a teacher has none
            host += everything - self.shards(self.facts.teacher)
        return host, disk


def _drawn(total: Tensor) -> list[int]:
    """Select about ``_POINTS`` places of a timeline: the peak of each interval, and the last place."""
    stretch = max(1, -(-len(total) // _POINTS))
    starts = range(0, len(total), stretch)
    chosen = [start + int(total[start : start + stretch].argmax()) for start in starts]
    return chosen if chosen[-1] == len(total) - 1 else [*chosen, len(total) - 1]
