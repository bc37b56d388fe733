"""Updated rows of parameters on their way to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vissl_zero.sharding.exchange.exchange import Exchange
from vissl_zero.sharding.torch_engine.message_plan import Message


class ParameterMessages:
    """After a step every rank tells its rows to all, straight into their parameters.

    Args:
        messages: as for the gradients.
        exchange: among the ranks that share the parameters.
    """

    def __init__(self, messages: Sequence[Message], exchange: Exchange):
        self._messages, self._exchange = messages, exchange

    @torch.no_grad()
    def share(self) -> None:
        """Make all ranks' copies of each row that of the rank which updates it. Collective; moves (N-1)/N of all."""
        for message in self._messages:
            self._post(message)
        self._exchange.finish()

    def _post(self, message: Message) -> None:
        # The views are made anew each time: kept, those of small parameters would outweigh them.
        views = [
            [piece.view(piece.shard.source.detach(), rank) for piece in message.pieces]
            for rank in range(self._exchange.num_ranks)
        ]
        mine = self._exchange.rank

        def fill(out: Tensor) -> None:
            torch._foreach_copy_(_slices(message, views[mine], out), views[mine])

        def drain(received: Sequence[Tensor]) -> None:
            for rank, values in enumerate(received):
                if rank != mine:
                    torch._foreach_copy_(views[rank], _slices(message, views[rank], values))

        dtype = message.pieces[0].shard.source.dtype
        self._exchange.post(message.payload, dtype, fill, drain, is_scatter=False)


def _slices(message: Message, views: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Where each view lies in a rank's part of a message."""
    pairs = zip(message.pieces, views, strict=True)
    return [values[piece.offset : piece.offset + view.numel()] for piece, view in pairs]
