"""Gradients on their way from the backward pass, where they are whole, to the ranks that need a part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from vissl_zero.sharding.exchange.exchange import Exchange, add_in_order
from vissl_zero.sharding.torch_engine.message_plan import Message, plan_messages
from vissl_zero.sharding.torch_engine.row_shard import RowShard

MAX_BACKLOG_BYTES = 2**23


class GradientMessages:
    """Sends each gradient off as soon as autograd has finished it, and drops it; keeps this rank's part of the mean.

    Messages go in a fixed order, since ranks must agree on one: what is expected last in the backward pass, the first
    parameters of the model, comes last. A message waits for those before it, at most until the backward pass ends; a
    parameter without gradient by then counts as zero. Where other ranks are behind, gradients are kept for a while
    rather than the backward pass held up: up to ``MAX_BACKLOG_BYTES`` of them.

    Args:
        shards: the trained parameters in the order of the model.
        exchange: among the ranks that share them.
    """

    def __init__(self, shards: Sequence[RowShard], exchange: Exchange):
        self._exchange = exchange
        self._dtype = shards[0].source.dtype if shards else torch.float32
        capacity = exchange.capacity(self._dtype)
        self.messages = plan_messages(shards[::-1], exchange.num_ranks, capacity)
        self._reduced = torch.empty(self.messages[-1].stop if self.messages else 0, dtype=self._dtype)
        self._zeros = torch.zeros(capacity, dtype=self._dtype)
        self._ones = torch.ones(capacity, dtype=self._dtype)
        self._is_summing = False  # whether ``_reduced`` holds gradients of this step already
        self._is_active = True
        self._ready: set[Tensor] = set()
        self._num_posted = 0
        self._backlog_bytes = 0
        self._num_rounds = 0
        self._is_callback_queued = False
        self._last_use = {piece.shard.source: i for i, message in enumerate(self.messages) for piece in message.pieces}
        for shard in shards:
            shard.source.register_post_accumulate_grad_hook(self._on_gradient)

    def start(self, *, is_active: bool) -> None:
        """Before a micro-batch. Inactive: gradients add up on this rank instead."""
        self._is_active = is_active
        self._num_rounds = 0

    def finish(self) -> None:
        """After a micro-batch. A rank whose loss has reached no parameter sends what it would have sent."""
        if self._is_active and not self._num_rounds:
            self._end_round()

    def forget(self) -> None:
        """The gradients are not needed any more."""
        self._is_summing = False

    def _on_gradient(self, param: Tensor) -> None:
        if not self._is_active:
            return
        if not self._is_callback_queued:
            self._is_callback_queued = True
            Variable._execution_engine.queue_callback(self._end_round)
        self._ready.add(param)
        self._backlog_bytes += param.nbytes
        while (
            self._num_posted < len(self.messages)
            and self._is_complete(self.messages[self._num_posted])
            and (self._backlog_bytes > MAX_BACKLOG_BYTES or self._exchange.can_post())
        ):
            self._post_next()

    def _is_complete(self, message: Message) -> bool:
        return all(piece.shard.source in self._ready for piece in message.pieces)

    def _end_round(self) -> None:
        """The backward pass has ended: send the rest, and take in all that is on its way."""
        self._is_callback_queued = False
        while self._num_posted < len(self.messages):
            self._post_next()
        self._exchange.finish()
        self._ready.clear()
        self._num_posted = self._backlog_bytes = 0
        self._num_rounds += 1
        self._is_summing = True

    @torch.no_grad()
    def _post_next(self) -> None:
        index = self._num_posted
        self._num_posted += 1
        message, is_sum = self.messages[index], self._is_summing
        self._exchange.post(
            message.num_flagged,
            self._dtype,
            lambda out: self._fill(message, out),
            lambda received: self._take(message, received, is_sum=is_sum),
            is_scatter=True,
        )
        for piece in message.pieces:
            if self._last_use[piece.shard.source] == index:
                piece.shard.source.grad = None
                self._backlog_bytes -= piece.shard.source.nbytes

    def _fill(self, message: Message, out: Tensor) -> None:
        grads = [piece.shard.source.grad for piece in message.pieces]
        flags = self._ones[: len(grads)]
        if any(grad is None for grad in grads):
            flags = torch.tensor([float(grad is not None) for grad in grads], dtype=self._dtype)
        parts = []
        for rank in range(self._exchange.num_ranks):
            for piece, grad in zip(message.pieces, grads, strict=True):
                missing = piece.numel
                if grad is not None:
                    parts.append(piece.view(grad, rank))
                    missing -= parts[-1].numel()
                if missing:
                    parts.append(self._zeros[:missing])
            parts.append(flags)
        torch.cat(parts, out=out)

    def _take(self, message: Message, received: Sequence[Tensor], *, is_sum: bool) -> None:
        mine = self._reduced[message.start : message.stop]
        total = torch.empty_like(mine) if is_sum else mine
        add_in_order([part[: message.payload] for part in received], total, is_mean=True)
        if is_sum:
            mine += total
        num_present = torch.stack([part[message.payload :] for part in received]).sum(0).tolist()
        for piece, number in zip(message.pieces, num_present, strict=True):
            shard = piece.shard
            if number and shard.reduced is None:
                begin = message.start + piece.offset
                shard.reduced = self._reduced[begin : begin + shard.local.numel()].view_as(shard.local)
