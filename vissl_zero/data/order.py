"""Which samples are in which step, and which of them are this rank's. Pure arithmetic, no images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vissl_zero.data.seeding import shuffled


@dataclass(frozen=True)
class MicroBatchPlan:
    """What one rank loads for one global micro-batch.

    Attributes:
        epoch: the epoch that augmentations are drawn for.
        sample_ids: this rank's samples.
        num_global: samples over all ranks.
    """

    epoch: int
    sample_ids: tuple[int, ...]
    num_global: int


def rank_slice(num_samples: int, rank: int, world_size: int) -> slice:
    """The samples of a global micro-batch that go to ``rank``: those i with i * world_size // num_samples == rank.

    Contiguous, and uneven by one at most; every sample goes to exactly one rank whatever the numbers are.
    """
    return slice(-(-rank * num_samples // world_size), -(-(rank + 1) * num_samples // world_size))


@dataclass(frozen=True)
class EpochOrder:
    """The steps of an epoch.

    Attributes:
        num_samples: length of the source.
        micro_batch: samples of a global micro-batch (all ranks).
        accumulation_steps: micro-batches per step.
        rank, world_size: of this process.
        seed: of the shuffling.
        is_exact: a rank's micro-batches are consecutive parts of its part of the step, so that a rank's samples lie
            together as they would with as many ranks more; otherwise each micro-batch is dealt to ranks by itself.
        drop_last: leave out the samples after the last whole step.
    """

    num_samples: int
    micro_batch: int
    accumulation_steps: int
    rank: int
    world_size: int
    seed: int
    drop_last: bool = False
    is_exact: bool = False

    @property
    def num_kept(self) -> int:
        """Samples of an epoch that are trained on.

        Without ``drop_last`` all of them, unless the last micro-batch would have fewer samples than there are ranks.
        """
        if self.drop_last:
            step = self.micro_batch * self.accumulation_steps
            return self.num_samples // step * step
        tail = self.num_samples % self.micro_batch
        return self.num_samples - tail if tail < self.world_size else self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps from the start of an epoch to its end; the last may be smaller."""
        return -(-self.num_kept // (self.micro_batch * self.accumulation_steps))

    def steps(self, epoch: int, start_sample: int = 0) -> Iterator[list[MicroBatchPlan]]:
        """The micro-batches of each step.

        Args:
            epoch: from 0.
            start_sample: samples of the epoch already trained on, over all ranks; any number, so that a run may resume
                with another batch size or world size.
        """
        order = shuffled(self.num_samples, self.seed, epoch)[start_sample : self.num_kept]
        if len(order) % self.micro_batch < self.world_size:  # a tail of another length than an epoch from its start has
            order = order[: len(order) - len(order) % self.micro_batch]
        for step in order.split(self.micro_batch * self.accumulation_steps):
            if len(step):  # split of an empty tensor gives one empty part
                yield self._dealt(epoch, step)

    def first(self) -> MicroBatchPlan:
        """The first micro-batch of an epoch that is not shuffled: as large as a run's, at no cost for any data set."""
        step = torch.arange(min(self.micro_batch * self.accumulation_steps, self.num_kept))
        return self._dealt(0, step)[0]

    def _dealt(self, epoch: int, step: Tensor) -> list[MicroBatchPlan]:
        if self.is_exact:
            return self._together(epoch, step)
        return [self._plan(epoch, part) for part in step.split(self.micro_batch)]

    def _together(self, epoch: int, step: Tensor) -> list[MicroBatchPlan]:
        """A step dealt to ranks as a whole; fewer micro-batches where there are not enough samples for one each."""
        shares = [step[rank_slice(len(step), rank, self.world_size)] for rank in range(self.world_size)]
        count = max(1, min(self.accumulation_steps, *map(len, shares)))
        parts = [[share[rank_slice(len(share), index, count)] for share in shares] for index in range(count)]
        return [MicroBatchPlan(epoch, tuple(part[self.rank].tolist()), sum(map(len, part))) for part in parts]

    def _plan(self, epoch: int, part: Tensor) -> MicroBatchPlan:
        own = part[rank_slice(len(part), self.rank, self.world_size)]
        return MicroBatchPlan(epoch, tuple(own.tolist()), len(part))


def sequential(num_samples: int, micro_batch: int, rank: int, world_size: int) -> Iterator[MicroBatchPlan]:
    """Every sample once, in order, the same number of micro-batches on every rank: for evaluation.

    Where the last micro-batch has fewer samples than there are ranks, a rank left without takes the last sample again:
    every rank must run the model equally often, and results are placed by sample id, so the copy changes nothing.
    """
    for part in torch.arange(num_samples).split(micro_batch):
        own = part[rank_slice(len(part), rank, world_size)].tolist()
        yield MicroBatchPlan(0, tuple(own or [int(part[-1])]), len(part))
