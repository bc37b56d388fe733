"""Reduce-scatter and all-gather of CPU tensors, in chunks that pass through small buffers of fixed size.

gloo's own reduce-scatter costs a whole all-reduce, and its all-gather is no better. Here every rank hands each other
rank what that one needs and nothing else, (N-1)/N of the data as in a ring, and what arrives is summed in the order of
ranks: the result does not depend on timing, and two ranks that sum the same elements get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Fill = Callable[[Tensor], None]
Drain = Callable[[Sequence[Tensor]], None]


class _Pending(NamedTuple):
    number: int
    view: Callable[[Tensor], Tensor]  # a sender's slot -> what it says to this rank
    drain: Drain


class CpuCommunicator(ABC):
    """Messages among the ranks of a group.

    A message is written by ``fill`` into a slot of ``slot_bytes`` and read by ``drain`` when it has come from all
    ranks: in the order of posting, ``LAG`` messages later or in ``finish``. Every rank must post the same messages in
    the same order. Slots are few and used in turn, so that nothing is allocated, whatever the size of the model.

    Args:
        num_ranks: of the group.
        rank: this one's place in it.
        slot_bytes: largest message, the parts for all ranks taken together.

    Attributes:
        sent_bytes: what has left this rank for others, by "gradients" (reduce-scatter) and "parameters" (all-gather).
    """

    LAG = 3  # how far, in messages, a rank may run ahead of the slowest

    def __init__(self, num_ranks: int, rank: int, slot_bytes: int):
        self.num_ranks, self.rank, self.slot_bytes = num_ranks, rank, slot_bytes
        self.sent_bytes: Counter[str] = Counter()
        self._num_posted = 0
        self._pending: deque[_Pending] = deque()

    @property
    def num_slots(self) -> int:
        """A slot is written again after ``2 * LAG`` messages.

        Message k is posted once this rank has read message k - LAG, and that was complete once all had posted it, hence
        read message k - 2 * LAG.
        """
        return 2 * self.LAG

    def capacity(self, dtype: torch.dtype) -> int:
        """Most elements per rank of one message."""
        return self.slot_bytes // dtype.itemsize // self.num_ranks

    def post(self, numel: int, dtype: torch.dtype, fill: Fill, drain: Drain, *, is_scatter: bool) -> None:
        """Send one message.

        Args:
            numel: elements for one rank, at most ``capacity``; the same on every rank.
            dtype: of the elements.
            fill: writes the message: (N * numel,), the part of rank r at r * numel, if ``is_scatter``; else (numel,).
            drain: is given N tensors of (numel,), in the order of ranks, valid during the call only.
            is_scatter: whether each rank gets a part of its own, or all get the same.
        """
        assert numel <= self.capacity(dtype), (numel, self.capacity(dtype))
        # Every rank reads before it writes on, which is what makes it safe to use a slot again (see num_slots).
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

        def say(out: Tensor) -> None:
            out.fill_(tag)

        def take(received: Sequence[Tensor]) -> None:
            check([int(part) for part in received])

        self.post(1, torch.int64, say, take, is_scatter=False)

    def can_post(self) -> bool:
        """Whether ``post`` would not wait for another rank. Not a collective, and ranks may differ."""
        return len(self._pending) < self.LAG or self._has_come(self._pending[0].number)

    def finish(self) -> None:
        """Drain all messages that have been posted."""
        while self._pending:
            self._drain_oldest()

    def reduce_scatter(self, output: Tensor, input: Tensor, *, is_mean: bool = False) -> None:
        """``output`` (m,) becomes this rank's part of the sum over ranks, or mean, of ``input`` (N * m,).

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
        """``output`` (N * m,) becomes the ``input`` (m,) of all ranks, which may be this rank's part of ``output``.

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
        """``received[r]`` becomes what rank r has in its ``sent[self.rank]``: the same bytes, however they are cut.

        Nothing is packed: tensors are read and written where they are, a slot at a time.

        Args:
            received, sent: by rank, tensors of uint8 (n,); those of this rank itself are not looked at.
            most_bytes: that a rank sends to another one; the same number on every rank.

        Collective; moves ``most_bytes`` to every other rank.
        """
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        writing = {rank: _Cursor(sent[rank]) for rank in others}
        reading = {rank: _Cursor(received[rank]) for rank in others}

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
        """Tensors that cover all its slots."""

    @abstractmethod
    def _slot(self, number: int) -> Tensor:
        """Where this rank writes message ``number``: uint8 (slot_bytes,)."""

    @abstractmethod
    def _publish(self, number: int, message: Tensor, is_scatter: bool) -> None:
        """Let the others have it. Must not wait for them."""

    @abstractmethod
    def _has_come(self, number: int) -> bool:
        """Whether ``_received`` would not wait."""

    @abstractmethod
    def _received(self, number: int) -> Sequence[Tensor]:
        """Message ``number`` of every rank, uint8 (slot_bytes,) laid out as it was sent. Waits for all of them."""


class _Cursor:
    """Walks over tensors (n,) as if they were one."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors, self._index, self._start = tensors, 0, 0

    def pieces(self, num_elements: int) -> Iterator[tuple[int, Tensor]]:
        """The next elements, fewer at the end: views, each with its place among them."""
        place = 0
        while place < num_elements and self._index < len(self._tensors):
            tensor = self._tensors[self._index]
            piece = tensor[self._start : self._start + num_elements - place]
            yield place, piece
            place, self._start = place + len(piece), self._start + len(piece)
            if self._start == len(tensor):
                self._index, self._start = self._index + 1, 0


def add_in_order(parts: Sequence[Tensor], out: Tensor, *, is_mean: bool) -> None:
    """``out`` becomes ((parts[0] + parts[1]) + parts[2]) + ..., divided by their number if ``is_mean``."""
    first, *rest = parts
    if not rest:
        out.copy_(first)
        return
    torch.add(first, rest[0], out=out)
    for part in rest[1:]:
        out.add_(part)
    if is_mean:
        out.div_(len(parts))
