"""A running average of the weights, kept shard by shard: an EMA teacher at no communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.shard import Shard


class WeightAverage:
    """Copies of this rank's shards and of the model's buffers, which follow them slowly.

    The average of an element depends on that element alone, so the average of a shard is the shard of the average: it
    is exact at every level, and costs one more copy of what the rank holds (in memory, also where the shards themselves
    are on disk). Integer buffers (counters) are copied.

    Args:
        shards: this rank's part of every parameter.
        buffers: those that belong into a checkpoint.
    """

    def __init__(self, shards: Iterable[Shard], buffers: Mapping[str, Tensor]):
        self._shards = list(shards)
        self._live_buffers = dict(buffers)
        self.params = {shard.name: shard.values().clone() for shard in self._shards}
        self.buffers = {name: tensor.clone() for name, tensor in self._live_buffers.items()}

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """``average = decay * average + (1 - decay) * weight``; a decay of 0 copies. Not a collective."""
        for shard in self._shards:
            follow_(self.params[shard.name], shard.values(), decay)
        for name, buffer in self._live_buffers.items():
            follow_(self.buffers[name], buffer, decay if buffer.is_floating_point() else 0.0)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights, in place. Not a collective."""
        for shard in self._shards:
            weight = shard.values().clone()
            shard.assign(self.params[shard.name])
            self.params[shard.name].copy_(weight)
        for name, buffer in self._live_buffers.items():
            value = buffer.clone()
            buffer.copy_(self.buffers[name])
            self.buffers[name].copy_(value)

    @torch.no_grad()
    def load(self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Take over saved averages: entries as ``sharding/rank_state.py`` has them.

        Raises:
            CheckpointError: they are of another model.
        """
        if params.keys() != self.params.keys() or buffers.keys() != self.buffers.keys():
            raise CheckpointError("The saved running average is of another model.")
        for name, average in self.params.items():
            average.copy_(params[name]["local"])
        for name, average in self.buffers.items():
            average.copy_(buffers[name])


def follow_(average: Tensor, value: Tensor, decay: float) -> None:
    """``average = decay * average + (1 - decay) * value``, in place; a decay of 0 copies."""
    if decay == 0:
        average.copy_(value)
    else:
        # Not lerp_: its vector and scalar code round differently, and shards are cut anywhere.
        average.mul_(decay).add_(value * (1 - decay))
