"""Messages that reduce full gradients to parts during the backward pass, and share updated rows after the step.

Gradients and parameters are packed into messages of limited size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vissl_zero.sharding.engines.cpu_communicator import MAX_BACKLOG_BYTES, CpuCommunicator, add_in_order
from vissl_zero.sharding.state.shard import RowShard
from vissl_zero.sharding.torch_private import (
    call_after_backward,
    call_on_gradient,
    foreach_copy_,
    is_in_backward,
    is_nested_backward,
    real_grad,
    set_real_grad,
)


class ParameterMessages:
    """Sends the rows that each rank has updated to all others, directly into their parameters.

    Args:
        messages: packing of the parameters, as for gradients.
        comm: communicator of the ranks that share the parameters.
    """

    def __init__(self, messages: Sequence[Message], comm: CpuCommunicator):
        self._messages, self._comm = messages, comm

    @torch.no_grad()
    def share(self) -> None:
        """Copy each row from the rank that updates it to all others. Collective; moves (N-1)/N of all."""
        for message in self._messages:
            self._post(message)
        self._comm.finish()

    def _post(self, message: Message) -> None:
        # The views are made each time: if kept, those of small parameters would outweigh the parameters.
        views = [
            [piece.view(piece.shard.source.detach(), rank) for piece in message.pieces]
            for rank in range(self._comm.num_ranks)
        ]
        mine = self._comm.rank

        def fill(out: Tensor) -> None:
            foreach_copy_(_slices(message, views[mine], out), views[mine])

        def drain(received: Sequence[Tensor]) -> None:
            for rank, values in enumerate(received):
                # This rank's rows are where the optimizer wrote them.
                if rank != mine:
                    foreach_copy_(views[rank], _slices(message, views[rank], values))

        self._comm.post(message.payload, message.dtype, fill, drain, is_scatter=False)


def _slices(message: Message, views: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Slice each view out of a rank's part of a message."""
    pairs = zip(message.pieces, views, strict=True)
    return [values[piece.offset : piece.offset + view.numel()] for piece, view in pairs]


@dataclass(frozen=True)
class Piece:
    """A run of elements of every rank's part of one parameter.

    Attributes:
        shard: the parameter.
        spans: per rank, begin and end in the full parameter, flattened; shorter than ``numel`` where its part ends.
        offset: place in the part that a message has for each rank.
        numel: elements of the largest part of any rank.
    """

    shard: RowShard
    spans: tuple[tuple[int, int], ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """End of the elements in the part that a message has for each rank."""
        return self.offset + self.numel

    def view(self, whole: Tensor, rank: int) -> Tensor:
        """Select a rank's elements of ``whole``, the parameter or its gradient."""
        start, stop = self.spans[rank]
        return whole.view(-1)[start:stop]


@dataclass(frozen=True)
class Message:
    """Parameters of one dtype that are sent at once.

    Attributes:
        pieces: consecutive pieces of each rank's part.
        start: place of the payload for this rank among the payloads of all messages of this dtype.
        payload: elements for each rank. One flag per piece follows them: whether there was a gradient.
    """

    pieces: tuple[Piece, ...]
    start: int
    payload: int

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self.pieces[0].shard.source.dtype

    @property
    def stop(self) -> int:
        """End of the payload for this rank."""
        return self.start + self.payload

    @property
    def num_flagged(self) -> int:
        """Elements for each rank, flags included."""
        return self.payload + len(self.pieces)


def plan_messages(
    shards: Sequence[RowShard], num_ranks: int, capacity_of: Callable[[torch.dtype], int]
) -> list[Message]:
    """Pack parameters into messages: large ones into several, small ones of one dtype together.

    Args:
        shards: shards in the order in which gradients are expected.
        num_ranks: number of ranks that share the state.
        capacity_of: returns, for a dtype, the most elements of a message per rank.
    """
    messages: list[Message] = []
    # One message of each dtype is filled at a time: layers may alternate between two.
    filled: dict[torch.dtype, list[Piece]] = {}
    stops: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        pieces = filled.pop(dtype)
        messages.append(Message(tuple(pieces), stops.get(dtype, 0), pieces[-1].stop))
        stops[dtype] = messages[-1].stop

    for shard in shards:
        done, dtype = 0, shard.source.dtype
        while done < shard.padded_numel:
            pieces = filled.get(dtype, [])
            payload = pieces[-1].stop if pieces else 0
            # Each piece takes one more element, its flag; the last 1 is this piece's.
            room = capacity_of(dtype) - payload - len(pieces) - 1
            numel = min(shard.padded_numel - done, room)
            if room <= 0 or (pieces and numel < shard.padded_numel - done):  # a cut parameter begins a message
                close(dtype)
                continue
            spans = tuple(_cut(shard.span(rank), done, numel) for rank in range(num_ranks))
            filled.setdefault(dtype, []).append(Piece(shard, spans, payload, numel))
            done += numel
    for dtype in list(filled):
        close(dtype)
    return messages


def _cut(span: tuple[int, int], offset: int, numel: int) -> tuple[int, int]:
    start, stop = span
    return min(start + offset, stop), min(start + offset + numel, stop)


class GradientMessages:
    """Sends each gradient as soon as autograd has finished it, frees it, and keeps this rank's part of the mean.

    Messages have one fixed order on all ranks: the last parameters of the model first, as the backward pass finishes
    them. A message waits for those before it, at most until the backward pass ends; a gradient that is still missing
    then counts as zero. Where other ranks are behind, up to ``MAX_BACKLOG_BYTES`` of gradients are kept, so that the
    backward pass need not wait.

    All messages together are a round, one per backward pass; segments of reentrant checkpointing belong to the backward
    pass around them. Ranks may run different numbers of backward passes: each round is announced, and a rank that has
    no more takes part with zeros.

    Args:
        shards: the trained parameters in the order of the model.
        messages: packing of their gradients, the last parameters first.
        comm: communicator of the ranks that share the parameters.
    """

    def __init__(self, shards: Sequence[RowShard], messages: Sequence[Message], comm: CpuCommunicator):
        self._comm = comm
        self.messages = messages
        stops = {message.dtype: message.stop for message in messages}
        self._reduced = {dtype: torch.empty(stop, dtype=dtype) for dtype, stop in stops.items()}
        # Slices of these pad messages, and stand for missing gradients.
        self._zeros = {dtype: torch.zeros(comm.capacity(dtype), dtype=dtype) for dtype in stops}
        self._is_summing = False  # whether ``_reduced`` holds gradients of this step already
        self._is_active = True
        self._has_own = False  # whether gradients of earlier micro-batches have not been sent
        self._ready: set[Tensor] = set()
        self._sending: dict[Tensor, Tensor | None] = {}
        self._num_posted = 0
        self._backlog_bytes = 0
        self._is_open = False
        self._is_driven = False  # whether ``backward_pass`` runs this pass, and ends the round itself
        self._is_callback_queued = False
        self._num_opening = 0.0
        # Index of the last message of each parameter: once it is posted, the full gradient can be freed.
        self._last_use = {piece.shard.source: i for i, message in enumerate(self.messages) for piece in message.pieces}
        for shard in shards:
            call_on_gradient([shard.source], self._on_gradient)
            # WholeParameter reads both when the loop asks for ``.grad``.
            shard.source._row_shard, shard.source._settle = shard, self.settle  # type: ignore[attr-defined]

    def start(self, *, is_active: bool) -> None:
        """Start a micro-batch. Inactive: gradients add up on this rank instead."""
        self._is_active = is_active

    def finish(self) -> None:
        """Finish a micro-batch: wait until no rank has gradients left to send."""
        if not (self._is_active and self.messages):
            return
        self.settle()
        # Ranks leave together: while one still opens a round, all others take part in it with zeros. A rank also opens
        # a round for gradients of earlier micro-batches, if this one had no backward pass.
        while self._announce(self._has_own, wait=True):
            self._end_round()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Run a backward pass of the caller's. A context."""
        self._is_driven = True
        try:
            yield
        finally:
            self._is_driven = False
        self.settle()

    def settle(self) -> None:
        """End the open round between backward passes: send the remaining gradients. Collective if a round is open."""
        # Inside a backward pass (a hook may read ``.grad``) more gradients are to come; only its end closes the round.
        if self._is_open and not is_in_backward():
            self._end_round()

    def forget(self) -> None:
        """Begin a new step: the next round overwrites the sums of this one."""
        self._is_summing = False

    def _on_gradient(self, param: Tensor) -> None:
        if not self._is_active:
            self._has_own = True
            return
        # Other ranks may have no gradients in this pass: the announcement makes them join with zeros.
        if not self._is_open:
            self._is_open = True
            self._announce(True)
        # With a plain loss.backward(), only autograd knows when the pass ends.
        if not (self._is_driven or self._is_callback_queued):
            self._is_callback_queued = True
            call_after_backward(self._after_backward)
        self._ready.add(param)
        self._backlog_bytes += param.nbytes
        # Messages have one fixed order, or ranks would pair different ones: an early gradient waits for its turn.
        while (
            self._num_posted < len(self.messages)
            and all(piece.shard.source in self._ready for piece in self.messages[self._num_posted].pieces)
            and (self._backlog_bytes > MAX_BACKLOG_BYTES or self._comm.can_post())
        ):
            self._post_next()

    def _after_backward(self) -> None:
        self._is_callback_queued = False
        # torch also calls this at the end of a segment of reentrant checkpointing, while the outer pass goes on.
        if self._is_open and not is_nested_backward():
            self._end_round()

    def _announce(self, is_opening: bool, *, wait: bool = False) -> bool:
        """Tell all ranks whether this rank opens a round. With ``wait``, return whether any rank does."""

        def pack(out: Tensor) -> None:
            out.fill_(is_opening)

        def unpack(received: Sequence[Tensor]) -> None:
            self._num_opening = float(sum(received))

        # A message like any other, so that it keeps its place in the order of messages.
        self._comm.post(1, torch.float32, pack, unpack, is_scatter=False)
        if wait:
            self._comm.finish()
        # Meaningful with wait only: without, the answers of this announcement are still to come.
        return self._num_opening > 0

    def _end_round(self) -> None:
        """End a round: send the remaining gradients, and receive all messages in flight. Collective."""
        is_begun = True
        while is_begun:
            while self._num_posted < len(self.messages):
                self._post_next()
            self._comm.finish()
            self._ready.clear()
            self._sending.clear()
            self._num_posted = self._backlog_bytes = 0
            self._is_open = self._has_own = False
            self._is_summing = True
            # Reentrant checkpointing adds to a gradient after it was sent, where segments share a parameter.
            is_begun = any(real_grad(source) is not None for source in self._last_use)
            if is_begun:
                self._announce(True)

    @torch.no_grad()
    def _post_next(self) -> None:
        index = self._num_posted
        self._num_posted += 1
        message, is_sum = self.messages[index], self._is_summing
        for piece in message.pieces:
            source = piece.shard.source
            if source not in self._sending:
                # Removed from .grad, or another backward pass would add to a gradient that was already sent.
                self._sending[source] = real_grad(source)
                set_real_grad(source, None)
        self._comm.post(
            message.num_flagged,
            message.dtype,
            lambda out: self._fill(message, out),
            lambda received: self._take(message, received, is_sum=is_sum),
            is_scatter=True,
        )
        for piece in message.pieces:
            # post() has packed its last piece, so the memory of the gradient can be freed.
            if self._last_use[piece.shard.source] == index:
                self._sending[piece.shard.source] = None
                self._backlog_bytes -= piece.shard.source.nbytes

    def _fill(self, message: Message, out: Tensor) -> None:
        grads = [self._sending[piece.shard.source] for piece in message.pieces]
        # Flags distinguish a zero gradient from none: a parameter that no rank has a gradient for is skipped.
        flags = torch.tensor([float(grad is not None) for grad in grads], dtype=message.dtype)
        parts = []
        for rank in range(self._comm.num_ranks):
            for piece, grad in zip(message.pieces, grads, strict=True):
                missing = piece.numel
                if grad is not None:
                    # Autograd may lay a gradient out in another way than its parameter, and a piece is a run of flat
                    # elements.
                    parts.append(piece.view(grad.contiguous(), rank))
                    missing -= parts[-1].numel()
                # All ranks' parts have one length, so that a message can be cut by position; short ones are padded.
                if missing:
                    parts.append(self._zeros[message.dtype][:missing])
            parts.append(flags)
        torch.cat(parts, out=out)

    def _take(self, message: Message, received: Sequence[Tensor], *, is_sum: bool) -> None:
        mine = self._reduced[message.dtype][message.start : message.stop]
        # The first round of a step overwrites the last step's result; further rounds add to it.
        total = torch.empty_like(mine) if is_sum else mine
        add_in_order([part[: message.payload] for part in received], total, is_mean=True)
        if is_sum:
            mine += total
        # What was received is valid only during this call: take the flags now.
        num_present = torch.stack([part[message.payload :] for part in received]).sum(0).tolist()
        for piece, number in zip(message.pieces, num_present, strict=True):
            shard = piece.shard
            if number and shard.reduced is None:
                begin = message.start + piece.offset
                # A view, set once: later pieces and rounds fill the same memory.
                shard.reduced = self._reduced[message.dtype][begin : begin + shard.local.numel()].view_as(shard.local)
