"""How gradients and updated parameters are packed into messages of limited size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vissl_zero.sharding.cpu_comm.communicator import CpuCommunicator
from vissl_zero.sharding.torch_engine.row_shard import RowShard


class ParameterMessages:
    """After a step, every rank sends its updated rows to all others, straight into their parameters.

    Args:
        messages: as for the gradients.
        comm: among the ranks that share the parameters.
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
            torch._foreach_copy_(_slices(message, views[mine], out), views[mine])

        def drain(received: Sequence[Tensor]) -> None:
            for rank, values in enumerate(received):
                # This rank's rows are where the optimizer wrote them.
                if rank != mine:
                    torch._foreach_copy_(views[rank], _slices(message, views[rank], values))

        dtype = message.pieces[0].shard.source.dtype
        self._comm.post(message.payload, dtype, fill, drain, is_scatter=False)


def _slices(message: Message, views: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Where each view lies in a rank's part of a message."""
    pairs = zip(message.pieces, views, strict=True)
    return [values[piece.offset : piece.offset + view.numel()] for piece, view in pairs]


@dataclass(frozen=True)
class Piece:
    """A run of elements of every rank's part of one parameter.

    Attributes:
        shard: the parameter.
        spans: per rank, begin and end in the full parameter, flattened; shorter than ``numel`` where its part ends.
        offset: place in the part that a message has for each rank.
        numel: elements for the rank that gets most.
    """

    shard: RowShard
    spans: tuple[tuple[int, int], ...]
    offset: int
    numel: int

    def view(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's elements of ``whole``, the parameter or its gradient."""
        start, stop = self.spans[rank]
        return whole.view(-1)[start:stop]


@dataclass(frozen=True)
class Message:
    """What is sent at once.

    Attributes:
        pieces: in the order in which they lie in each rank's part, one behind the other.
        start: place of the payload for this rank among the payloads of all messages.
        payload: elements for each rank; as many flags as pieces follow, which say whether there was a gradient.
    """

    pieces: tuple[Piece, ...]
    start: int
    payload: int

    @property
    def stop(self) -> int:
        """End of the payload for this rank."""
        return self.start + self.payload

    @property
    def num_flagged(self) -> int:
        """Elements for each rank, flags included."""
        return self.payload + len(self.pieces)


def plan_messages(shards: Sequence[RowShard], num_ranks: int, capacity: int) -> list[Message]:
    """Pack parameters one behind the other, large ones in several messages, small ones together.

    Args:
        shards: in the order in which gradients are expected.
        num_ranks: that share the state.
        capacity: most elements a rank's part of a message may have.
    """
    messages: list[Message] = []
    pieces: list[Piece] = []
    payload = 0

    def close() -> None:
        nonlocal payload, pieces
        if pieces:
            messages.append(Message(tuple(pieces), messages[-1].stop if messages else 0, payload))
        pieces, payload = [], 0

    for shard in shards:
        done = 0
        while done < shard.padded_numel:
            # Each piece takes one more element, its flag; the last 1 is this piece's.
            room = capacity - payload - len(pieces) - 1
            numel = min(shard.padded_numel - done, room)
            if room <= 0 or (pieces and numel < shard.padded_numel - done):  # a cut parameter begins a message
                close()
                continue
            spans = tuple(_cut(shard.span(rank), done, numel) for rank in range(num_ranks))
            pieces.append(Piece(shard, spans, payload, numel))
            payload += numel
            done += numel
    close()
    return messages


def _cut(span: tuple[int, int], offset: int, numel: int) -> tuple[int, int]:
    start, stop = span
    return min(start + offset, stop), min(start + offset + numel, stop)
