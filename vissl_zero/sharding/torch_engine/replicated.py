"""Levels at which every rank holds the parameters whole: level 0, and levels 1 and 2 on the CPU.

At level 0 gradients are averaged. At levels 1 and 2 on the CPU gradients and updated rows travel in messages.
``fully_shard`` runs these levels too, and does so where this cannot: on GPUs, in half precision, with replicas of
shard groups. It copies every gradient and parameter in and out of buffers, which on a CPU, where communication is
copying, costs as much as the communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor

from vissl_zero.sharding.cpu_communicator import open_communicator
from vissl_zero.sharding.gradient_average import GradientAverage, OrderedMeans
from vissl_zero.sharding.offload.tier import offloaded
from vissl_zero.sharding.shard import RowShard, row_shards
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel
from vissl_zero.sharding.strategy import StepResult
from vissl_zero.sharding.torch_engine.gradient_messages import GradientMessages, ParameterMessages, plan_messages


class Replicated(ShardedModel):
    """A whole model on every rank; on a single rank, the model and nothing else. See ``ShardedModel``.

    Attributes:
        means: of the gradients; in a deterministic run they are taken after every micro-batch, in the order of ranks.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        params = list(module.parameters())
        self.means = OrderedMeans(params) if plan.deterministic else GradientAverage(params, plan.timeout_s)
        # No group: gradients are averages on every rank, so each finds the same norms by itself.
        super().__init__(setup, group=None)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged in the last micro-batch; in all of them where the order of sums is fixed."""
        return self.means.micro_batch(is_last)

    def _backward_pass(self) -> AbstractContextManager[None]:
        return self.means.backward_pass() if isinstance(self.means, GradientAverage) else nullcontext()


class ReplicatedParameters(ShardedModel):
    """A model that every rank holds in full, and of which each rank updates a part. See ``ShardedModel``.

    Attributes:
        comm: among all ranks.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        group = dist.group.WORLD
        assert group is not None
        self.comm = open_communicator(group, plan.timeout_s)
        for param in module.parameters():
            # Messages carry runs of a flattened parameter.
            param.data = param.data.contiguous()
        shards = list(row_shards(module, setup.trained, group.size(), group.rank()))
        rows = [shard for shard in shards if isinstance(shard, RowShard)]
        self._means: GradientAverage | None = None
        # Reversed: the backward pass finishes the last parameters first.
        messages = plan_messages(rows[::-1], group.size(), self.comm.capacity(rows[0].source.dtype)) if rows else []
        # The loop wants to read and change full gradients, so they are averaged in place and not sent away.
        if plan.keep_gradients:
            self._means = GradientAverage([shard.source for shard in rows], plan.timeout_s)
        else:
            self._gradients = GradientMessages(rows, messages, self.comm)
        self._parameters = ParameterMessages(messages, self.comm)
        assert setup.build_optimizer is not None  # a teacher of these levels is a whole copy
        build_optimizer = offloaded(setup.build_optimizer, plan, None, shards)
        # The shards are views: what they share memory with is whole already.
        wrap_plan = dataclasses.replace(setup.wrap_plan, whole_bytes=0)
        setup = dataclasses.replace(setup, build_optimizer=build_optimizer, wrap_plan=wrap_plan)
        super().__init__(setup, group, shards, comm=self.comm)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Level 2 reduces gradients in every backward pass; level 1 keeps them whole until the last one.

        Where the order of sums is fixed, level 1 does as level 2.
        """
        if self._means is not None:
            with self._means.micro_batch(is_last):
                yield
            return
        self._gradients.start(is_active=is_last or self._plan.level == 2 or self._plan.deterministic)
        yield
        # Not in a finally: after an error on this rank, waiting for the others could last until the timeout.
        self._gradients.finish()

    def _backward_pass(self) -> AbstractContextManager[None]:
        return (self._gradients if self._means is None else self._means).backward_pass()

    def step(self) -> StepResult:
        """See ``Sharded``."""
        result = super().step()
        if not result.skipped:
            # A skipped step has changed nothing to tell.
            self._parameters.share()
        return result

    def zero_grad(self) -> None:
        """See ``Sharded``."""
        super().zero_grad()
        if self._means is None:
            self._gradients.forget()

    def replicated(self) -> dict[str, Tensor]:
        """See ``Sharded``. All parameters are whole on every rank."""
        return super().replicated() | {name: shard.source.detach() for name, shard in self._shards.items()}

    def _after_shards_change(self) -> None:
        """What was set are the rows that this rank updates: send them to the others."""
        self._parameters.share()
