"""Reduce-scatter and all-gather of CPU tensors, in chunks that pass through small buffers of fixed size.

gloo's own reduce-scatter costs a whole all-reduce, and its all-gather is no better. Here every rank sends each other
rank only the part that it needs, (N-1)/N of the data as in a ring, and the receiver sums in the order of ranks: the
result does not depend on timing, and two ranks that sum the same elements get the same bits.

The CPU ranks of a group communicate through memory that all of them map, or, between machines, through gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.sharding.torch_private import timeout_of

Fill = Callable[[Tensor], None]
Drain = Callable[[Sequence[Tensor]], None]


class _Pending(NamedTuple):
    number: int
    view: Callable[[Tensor], Tensor]  # from a sender's slot, selects the part for this rank
    drain: Drain


class CpuCommunicator(ABC):
    """Messages among the ranks of a group.

    ``fill`` writes a message into a slot of ``slot_bytes``; ``drain`` reads it when it has arrived from all ranks: in
    the order of posting, ``LAG`` messages later or in ``finish``. Every rank must post the same messages in the same
    order. Slots are few and used in turn, so that nothing is allocated, whatever the size of the model.

    Args:
        num_ranks: number of ranks of the group.
        rank: position of this rank in the group.
        slot_bytes: bytes of the largest message, including the parts for all ranks.

    Attributes:
        sent_bytes: bytes sent to other ranks, by "gradients" (reduce-scatter) and "parameters" (all-gather).
    """

    LAG = 3  # how far, in messages, a rank may run ahead of the slowest

    def __init__(self, num_ranks: int, rank: int, slot_bytes: int):
        self.num_ranks, self.rank, self.slot_bytes = num_ranks, rank, slot_bytes
        self.sent_bytes: Counter[str] = Counter()
        self._num_posted = 0
        self._pending: deque[_Pending] = deque()

    @property
    def num_slots(self) -> int:
        """Number of message buffers of a rank. After ``2 * LAG`` messages a buffer is reused: all ranks have read it.

        This rank posts message k after it has read message k - LAG of every rank. A rank posts its message k - LAG
        after it has read message k - 2 * LAG. So every rank has read message k - 2 * LAG.
        """
        return 2 * self.LAG

    def capacity(self, dtype: torch.dtype) -> int:
        """Return the most elements per rank of one message."""
        return self.slot_bytes // dtype.itemsize // self.num_ranks

    def post(self, numel: int, dtype: torch.dtype, fill: Fill, drain: Drain, *, is_scatter: bool) -> None:
        """Send one message.

        Args:
            numel: elements for one rank, at most ``capacity``; the same on every rank.
            dtype: data type of the elements.
            fill: writes the message: (N * numel,), the part of rank r at r * numel, if ``is_scatter``; else (numel,).
            drain: called with N tensors (numel,), in the order of ranks, which are valid during the call only.
            is_scatter: whether each rank gets a part of its own, or all get the same.
        """
        assert numel <= self.capacity(dtype), (numel, self.capacity(dtype))
        # Every rank reads before it writes further messages: this makes it safe to reuse a slot (see num_slots).
        while len(self._pending) >= self.LAG:
            self._drain_oldest()
        number = self._num_posted
        message = self._slot(number)[: numel * dtype.itemsize * (self.num_ranks if is_scatter else 1)].view(dtype)
        fill(message)
        self._publish(number, message, is_scatter)
        self._num_posted += 1
        kind = "gradients" if is_scatter else "parameters"
        self.sent_bytes[kind] += numel * dtype.itemsize * (self.num_ranks - 1)
        start = self.rank * numel if is_scatter else 0
        self._pending.append(_Pending(number, lambda slot: slot.view(dtype)[start : start + numel], drain))

    def announce(self, tag: int, check: Callable[[Sequence[int]], None]) -> None:
        """Send ``tag`` to all ranks; ``check`` gets the tags of all ranks before any later message is read.

        A message of 8 bytes, which the next ones need not wait for.
        """

        def pack(out: Tensor) -> None:
            out.fill_(tag)

        def unpack(received: Sequence[Tensor]) -> None:
            check([int(part) for part in received])

        self.post(1, torch.int64, pack, unpack, is_scatter=False)

    def can_post(self) -> bool:
        """Check whether ``post`` would not wait for another rank. Not a collective, and ranks may differ."""
        return len(self._pending) < self.LAG or self._has_come(self._pending[0].number)

    def finish(self) -> None:
        """Drain all messages that have been posted."""
        while self._pending:
            self._drain_oldest()

    def reduce_scatter(self, output: Tensor, input: Tensor, *, is_mean: bool) -> None:
        """Set ``output`` (m,) to this rank's part of the sum over ranks, or mean, of ``input`` (N * m,).

        Both contiguous; summed in the order of ranks. Collective; moves (N-1)/N of ``input``.
        """
        parts = input.view(self.num_ranks, -1)
        for start, stop in self._spans(output):

            def fill(message: Tensor, start: int = start, stop: int = stop) -> None:
                message.view(self.num_ranks, -1).copy_(parts[:, start:stop])

            # Bound as defaults, because the loop has moved on by the time that a message is drained.
            def drain(received: Sequence[Tensor], start: int = start, stop: int = stop) -> None:
                add_in_order(received, output[start:stop], is_mean=is_mean)

            self.post(stop - start, output.dtype, fill, drain, is_scatter=True)
        self.finish()

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Set ``output`` (N * m,) to the ``input`` (m,) of all ranks, which may be this rank's part of ``output``.

        Both contiguous. Collective; moves (N-1)/N of ``output``.
        """
        parts = output.view(self.num_ranks, -1)
        for start, stop in self._spans(input):

            def fill(message: Tensor, start: int = start, stop: int = stop) -> None:
                message.copy_(input[start:stop])

            def drain(received: Sequence[Tensor], start: int = start, stop: int = stop) -> None:
                for part, values in zip(parts, received, strict=True):
                    part[start:stop].copy_(values)

            self.post(stop - start, input.dtype, fill, drain, is_scatter=False)
        self.finish()

    def all_to_all(
        self, received: Sequence[Sequence[Tensor]], sent: Sequence[Sequence[Tensor]], most_bytes: int
    ) -> None:
        """Set ``received[r]`` to what rank r has in its ``sent[self.rank]``: the same bytes, however they are cut.

        Nothing is packed: tensors are read and written where they are, a slot at a time.

        Args:
            received, sent: per rank, tensors of uint8 (n,); the entries of this rank itself are ignored.
            most_bytes: largest number of bytes that any rank sends to another; the same on every rank.

        Collective; moves ``most_bytes`` to every other rank.
        """
        writing, reading = list(map(_Cursor, sent)), list(map(_Cursor, received))

        def fill(message: Tensor) -> None:
            for rank, part in enumerate(message.view(self.num_ranks, -1)):
                if rank != self.rank:
                    for start, piece in writing[rank].pieces(len(part)):
                        part[start : start + len(piece)].copy_(piece)

        def drain(messages: Sequence[Tensor]) -> None:
            for rank, part in enumerate(messages):
                if rank != self.rank:
                    for start, piece in reading[rank].pieces(len(part)):
                        piece.copy_(part[start : start + len(piece)])

        step = self.capacity(torch.uint8)
        for start in range(0, most_bytes, step):
            self.post(min(step, most_bytes - start), torch.uint8, fill, drain, is_scatter=True)
        self.finish()

    def _spans(self, part: Tensor) -> list[tuple[int, int]]:
        step = self.capacity(part.dtype)
        return [(start, min(start + step, part.numel())) for start in range(0, part.numel(), step)]

    def _drain_oldest(self) -> None:
        number, view, drain = self._pending.popleft()
        drain([view(slot) for slot in self._received(number)])

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """Return tensors over the memory of all slots, to count it."""

    @abstractmethod
    def _slot(self, number: int) -> Tensor:
        """Return where this rank writes message ``number``: uint8 (slot_bytes,)."""

    @abstractmethod
    def _publish(self, number: int, message: Tensor, is_scatter: bool) -> None:
        """Make the message visible to the other ranks, without waiting for them."""

    @abstractmethod
    def _has_come(self, number: int) -> bool:
        """Check whether ``_received`` would not wait."""

    @abstractmethod
    def _received(self, number: int) -> Sequence[Tensor]:
        """Wait for message ``number`` of every rank, and return them: uint8 (slot_bytes,) laid out as sent."""


class _Cursor:
    """Walks over tensors (n,) as if they were one."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors, self._index, self._start = tensors, 0, 0

    def pieces(self, num_elements: int) -> Iterator[tuple[int, Tensor]]:
        """Yield views of the next ``num_elements`` elements, each with its offset; fewer at the end."""
        place = 0
        while place < num_elements and self._index < len(self._tensors):
            tensor = self._tensors[self._index]
            piece = tensor[self._start : self._start + num_elements - place]
            yield place, piece
            place, self._start = place + len(piece), self._start + len(piece)
            if self._start == len(tensor):
                self._index, self._start = self._index + 1, 0


def add_in_order(parts: Sequence[Tensor], out: Tensor, *, is_mean: bool) -> None:
    """Set ``out`` to ((parts[0] + parts[1]) + parts[2]) + ..., divided by their number if ``is_mean``.

    Half precision is summed in float32, and rounded once.
    """
    first, *rest = parts
    if not rest:
        out.copy_(first)
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    torch.add(first.to(wide), rest[0].to(wide), out=total)
    for part in rest[1:]:
        total.add_(part)
    if is_mean:
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)


_HEADER_BYTES = mmap.PAGESIZE  # its first eight bytes count the messages that have been published
_YIELDS = 300  # some 100 microseconds
_SLEEP_S = 50e-6
_CHECK_S = 1.0


class LostRankError(RuntimeError):
    """Another rank has ended or does not answer."""


@dataclass(frozen=True)
class _MemoryAddress:
    """The address of a rank's memory: only processes with the same ``machine`` can open it."""

    machine: tuple[str, int]
    pid: int
    fd: int


class SharedMemoryCommunicator(CpuCommunicator):
    """A rank writes into memory of its own and counts up; the others read the count, then the memory.

    The memory has no name in any file system (memfd): only processes of the same user that are given its descriptor can
    open it, it needs no room in /dev/shm, and it is gone with its last process, however that ends.

    Args:
        memories: mapped memory of each rank of the group.
        pids: process ids of the ranks.
        rank: position of this rank in the group.
        timeout_s: longest wait for a message.
    """

    def __init__(
        self, memories: Sequence[mmap.mmap], pids: Sequence[int], rank: int, slot_bytes: int, timeout_s: float
    ):
        super().__init__(len(memories), rank, slot_bytes)
        self._pids, self._timeout_s = list(pids), timeout_s
        # Each count has one writer, its owner, so no lock is needed.
        self._counts = [memoryview(memory)[:8].cast("q") for memory in memories]
        # Only this rank's own slots are written. Others' memory is mapped writable too, because torch has no read-only
        # tensors and would warn of each.
        tensors = [torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES) for memory in memories]
        self._slots = [list(tensor.split(slot_bytes)) for tensor in tensors]

    def buffers(self) -> list[Tensor]:
        """Return its slots; see ``CpuCommunicator``."""
        return [slots[0] for slots in self._slots]

    def _slot(self, number: int) -> Tensor:
        return self._slots[self.rank][number % self.num_slots]

    def _publish(self, number: int, message: Tensor, is_scatter: bool) -> None:
        # x86 makes stores visible in program order: a rank that reads the new count also reads the message.
        self._counts[self.rank][0] = number + 1

    def _has_come(self, number: int) -> bool:
        return all(count[0] > number for count in self._counts)

    def _received(self, number: int) -> Sequence[Tensor]:
        for sender, count in enumerate(self._counts):
            if count[0] <= number:
                self._wait(sender, number)
        return [slots[number % self.num_slots] for slots in self._slots]

    def _wait(self, sender: int, number: int) -> None:
        count = self._counts[sender]
        # Peers are usually microseconds behind: sleeping at once would cost more than the wait.
        for _ in range(_YIELDS):
            os.sched_yield()
            if count[0] > number:
                return
        started = checked = time.monotonic()
        while count[0] <= number:
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                # A killed peer never counts up. Looking for its process ends the wait before the timeout.
                self._require_alive(sender)
                if now - started > self._timeout_s:
                    raise LostRankError(
                        f"No answer from peer rank {sender} of the shard group for {self._timeout_s:.0f} s. "
                        "Check why that rank is late, or raise the timeout of collectives."
                    )

    def _require_alive(self, sender: int) -> None:
        try:
            os.kill(self._pids[sender], 0)  # signal 0: only check
        except ProcessLookupError:
            raise LostRankError(f"The process of peer rank {sender} of the shard group has ended.") from None


def _open_shared_memory(group: dist.ProcessGroup, slot_bytes: int, timeout_s: float) -> SharedMemoryCommunicator | None:
    """Open memory shared by ``group``; None on every rank if its ranks cannot share memory. Collective.

    Only on x86, whose order of stores it relies on.
    """
    num_bytes = _HEADER_BYTES + slot_bytes * 2 * CpuCommunicator.LAG
    mine: _MemoryAddress | None = None
    memory: mmap.mmap | None = None
    machine = _machine()
    if machine is not None:
        fd = os.memfd_create("vissl_zero")
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        mine = _MemoryAddress(machine, os.getpid(), fd)
    addresses: list[_MemoryAddress | None] = [None] * group.size()
    dist.all_gather_object(addresses, mine, group=group)
    memories = _map(addresses, memory, group.rank(), num_bytes)
    is_open = torch.tensor([memories is not None])
    # All ranks must use the same transport: if one cannot map the memory, all use gloo.
    dist.all_reduce(is_open, dist.ReduceOp.MIN, group=group)
    if mine is not None:
        # After the all-reduce: every rank that can open this descriptor has done so.
        os.close(mine.fd)
    if memories is None or not bool(is_open):
        return None
    pids = [address.pid for address in addresses if address is not None]
    return SharedMemoryCommunicator(memories, pids, group.rank(), slot_bytes, timeout_s)


def _machine() -> tuple[str, int] | None:
    """Identify the running system and its process namespace; None where this cannot work."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):
        return None
    try:
        # A pid identifies a process only within one pid namespace of one running system.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _map(
    addresses: Sequence[_MemoryAddress | None], mine: mmap.mmap | None, rank: int, num_bytes: int
) -> list[mmap.mmap] | None:
    if mine is None or any(address is None or addresses[rank] is None for address in addresses):
        return None
    memories = []
    for index, address in enumerate(addresses):
        assert address is not None
        if index == rank:
            memories.append(mine)
            continue
        if address.machine != addresses[rank].machine:  # type: ignore[union-attr]
            return None
        try:
            # O_RDWR, though only the owner writes: mmap's default needs a writable descriptor.
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
        except OSError:
            return None
        try:
            memories.append(mmap.mmap(fd, num_bytes))
        finally:
            os.close(fd)
    return memories


class GlooCommunicator(CpuCommunicator):
    """One all-to-all, or a broadcast per rank, for each message.

    Measured with 64 MB of float32 a rank, 2 and 4 ranks on one machine: 27 and 49 ms for an all-to-all and a local sum,
    78 and 157 ms for gloo's reduce-scatter; 19 and 40 ms for broadcasts, 57 and 104 ms for its all-gather.

    Args:
        group: gloo group for this object alone, so that its messages cannot be mixed up with other collectives.
    """

    def __init__(self, group: dist.ProcessGroup, slot_bytes: int):
        super().__init__(group.size(), group.rank(), slot_bytes)
        self._group = group
        self._sent = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(self.num_slots)]
        self._arrived = [torch.empty(group.size(), slot_bytes, dtype=torch.uint8) for _ in range(self.num_slots)]
        self._works: dict[int, list[dist.Work]] = {}

    def buffers(self) -> list[Tensor]:
        """Return its slots; see ``CpuCommunicator``."""
        return [*self._sent, *self._arrived]

    def announce(self, tag: int, check: Callable[[Sequence[int]], None]) -> None:
        """Send and wait; see ``CpuCommunicator``. Ranks must agree first: gloo fails on messages of different sizes."""
        super().announce(tag, check)
        self.finish()

    def _slot(self, number: int) -> Tensor:
        return self._sent[number % self.num_slots]

    def _publish(self, number: int, message: Tensor, is_scatter: bool) -> None:
        arrived = self._arrived[number % self.num_slots]
        sent = message.view(torch.uint8)
        if is_scatter:
            size = len(sent) // self.num_ranks
            # At the place that the part has in the sender's slot, where ``_Pending.view`` selects it.
            parts = [arrived[sender, self.rank * size : (self.rank + 1) * size] for sender in range(self.num_ranks)]
            self._works[number] = _all_to_all(parts, list(sent.split(size)), self._group)
            return
        # gloo pairs collectives by their order, so every rank posts the broadcasts in the order of senders.
        works = []
        for sender in range(self.num_ranks):
            buffer = sent if sender == self.rank else arrived[sender, : len(sent)]
            works.append(dist.broadcast(buffer, group=self._group, group_src=sender, async_op=True))
        arrived[self.rank, : len(sent)] = sent
        self._works[number] = works

    def _has_come(self, number: int) -> bool:
        return all(work.is_completed() for work in self._works[number])

    def _received(self, number: int) -> Sequence[Tensor]:
        for work in self._works.pop(number):
            work.wait()
        return list(self._arrived[number % self.num_slots])


def _all_to_all(arrived: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Post pairs of sends and receives, because gloo has no all-to-all of separate tensors; return their works."""
    rank = group.rank()
    arrived[rank].copy_(sent[rank])
    works = []
    for peer in range(group.size()):
        if peer != rank:
            works.append(dist.irecv(arrived[peer], group=group, group_src=peer))
            works.append(dist.isend(sent[peer], group=group, group_dst=peer))
    return [work for work in works if work is not None]


SLOT_BYTES = 2**20  # fits into a core's cache; 2 * LAG of them per rank. Twice or half the size is as fast
MAX_BACKLOG_BYTES = 2**23  # of gradients that a rank keeps, instead of waiting, while other ranks are behind


def open_communicator(group: dist.ProcessGroup, timeout_s: float, *, use_shared_memory: bool = True) -> CpuCommunicator:
    """Open shared memory if all ranks of ``group`` run on one machine, else gloo. For CPU tensors.

    Collective over the world: every rank calls it, each with its own group.

    Args:
        group: the ranks that communicate.
        timeout_s: longest wait for a message, in seconds, limited by the timeout of ``group``.
        use_shared_memory: False: always use gloo.
    """
    comm: CpuCommunicator | None = None
    timeout_s = min(timeout_s, timeout_of(group).total_seconds())
    if use_shared_memory:
        comm = _open_shared_memory(group, SLOT_BYTES, timeout_s)
    gloo_ranks: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gloo_ranks, None if comm else tuple(dist.get_process_group_ranks(group)))
    # new_group is a collective of the world: every rank makes all groups, its own or not, in one order.
    for ranks in sorted({ranks for ranks in gloo_ranks if ranks}):
        gloo_group = collectives.new_group(timeout_s, ranks, backend="gloo")
        if dist.get_rank() in ranks:
            comm = GlooCommunicator(gloo_group, SLOT_BYTES)
    assert comm is not None
    return comm
