"""The torch engine: which class runs a level, and the classes with which every rank holds the parameters whole.

``fully_shard`` runs levels 1 to 3 (``fully_sharded.py``). ``Replicated`` is level 0: gradients are averaged.
``ReplicatedParameters`` is levels 1 and 2 on the CPU: gradients and updated rows travel in messages. ``fully_shard``
runs these levels too, and does so where this cannot: on GPUs, in half precision, with replicas of shard groups. It
copies every gradient and parameter in and out of buffers, which on a CPU, where communication is copying, costs as much
as the communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.adaptation import Adaptation, OptimizerFactory
from vissl_zero.optim.elementwise import single_rounded
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import keeps_parameters_whole
from vissl_zero.sharding.engines.cpu_communicator import open_communicator
from vissl_zero.sharding.engines.gradient_average import OWN_GRADIENTS, GradientAverage, OrderedMeans
from vissl_zero.sharding.engines.torch.fully_sharded import FullySharded
from vissl_zero.sharding.engines.torch.gradient_messages import GradientMessages, ParameterMessages, plan_messages
from vissl_zero.sharding.offload.tier import offloaded
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel
from vissl_zero.sharding.state.shard import RowShard, row_shards
from vissl_zero.sharding.state.sharded_tensor import WHOLE_LEVELS
from vissl_zero.sharding.strategy import Strategy
from vissl_zero.sharding.torch_private import num_gradient_hooks


@STRATEGIES.register("torch")
class TorchStrategy(Strategy):
    """Full replicas at level 0; replicated parameters or ``fully_shard`` at levels 1 and 2; ``fully_shard`` at 3."""

    def _shard(self, setup: ModelSetup) -> ShardedModel:
        plan = setup.plan
        # torch's kernels round the vector loop and its remainder differently, and levels cut tensors at different
        # places. Optimizers of whole tensors see the same tensors at every level.
        if plan.deterministic and not plan.needs_whole_tensors:
            assert setup.build_optimizer is not None
            setup = dataclasses.replace(setup, build_optimizer=_single_rounded(setup.build_optimizer))
        is_whole = keeps_parameters_whole(plan, setup.wrap_plan.num_ranks, collectives.world_size(), setup.device.type)
        if plan.level and not is_whole:
            # Only here: the other classes keep the user's parameters, and with them their hooks.
            _refuse_hooked(setup.module)
            return FullySharded(setup)
        setup.fill(setup.module, "")
        setup.module.to(setup.device)
        return ReplicatedParameters(setup) if plan.level else Replicated(setup)


def _refuse_hooked(model: nn.Module) -> None:
    """Refuse hooks on parameters: ``fully_shard`` replaces parameters, so a hook would never run."""
    hooked = [name for name, param in model.named_parameters() if num_gradient_hooks(param)]
    if hooked:
        must = "must have no hooks where fully_shard replaces parameters: they would never run"
        fix = f"Put the hook on a module's output, or use {WHOLE_LEVELS}."
        raise ConfigError([Problem("model", f"{hooked[0]} has a hook", must, fix)])


def _single_rounded(build_optimizer: OptimizerFactory) -> OptimizerFactory:
    def factory(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, Adaptation | None]:
        optimizer, adaptation = build_optimizer(groups)
        return single_rounded(optimizer), adaptation

    return factory


class Replicated(ShardedModel):
    """A whole model on every rank; on a single rank, the model and nothing else. See ``ShardedModel``.

    Attributes:
        means: means of the gradients; in a deterministic run they are taken after every micro-batch, in the order of
            ranks.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        params = list(module.parameters())
        self.means = OrderedMeans(params) if plan.deterministic else GradientAverage(params, plan.timeout_s)
        # No group: averaged gradients are equal on every rank, so each computes the same norms without a message.
        super().__init__(setup, group=None)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Average gradients in the last micro-batch; in all of them where the order of sums is fixed."""
        return self.means.micro_batch(is_last)

    def _backward_pass(self) -> AbstractContextManager[None]:
        return self.means.backward_pass() if isinstance(self.means, GradientAverage) else nullcontext()

    def _facts(self) -> dict[str, int]:
        """Collect the facts; see ``ShardedModel``."""
        return super()._facts() | (
            {} if isinstance(self.means, OrderedMeans) else {OWN_GRADIENTS: self.means.changed()}
        )

    def retire_gradients(self) -> None:
        """Retire the gradients; see ``ShardedModel``."""
        # step() has unscaled them; a further backward pass would add scaled gradients.
        if self._loss_scale is not None:
            super().retire_gradients()


class ReplicatedParameters(ShardedModel):
    """A model that every rank holds in full, while each rank updates a part of it. See ``ShardedModel``.

    Attributes:
        comm: communicator of all ranks.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        group = dist.group.WORLD
        assert group is not None
        self.comm = open_communicator(group, plan.timeout_s)
        for param in module.parameters():
            # Messages carry runs of a flattened parameter, so channels_last weights are laid out by rows.
            param.data = param.data.contiguous()
        shards = list(row_shards(module, setup.trained, group.size(), group.rank()))
        rows = [shard for shard in shards if isinstance(shard, RowShard)]
        self._means: GradientAverage | None = None
        left_out = [param for name, param in module.named_parameters() if name not in setup.trained]
        # The loop may train these by another optimizer, which needs averaged gradients too.
        self._means_of_others = GradientAverage(left_out, plan.timeout_s)
        # Reversed: the backward pass finishes the last parameters first.
        messages = plan_messages(rows[::-1], group.size(), self.comm.capacity)
        # The loop wants to read and change full gradients: average them in place instead of reducing them to parts.
        if plan.keep_gradients:
            self._means = GradientAverage([shard.source for shard in rows], plan.timeout_s)
        else:
            self._gradients = GradientMessages(rows, messages, self.comm)
        self._parameters = ParameterMessages(messages, self.comm)
        assert setup.build_optimizer is not None  # a teacher of these levels is a whole copy
        build_optimizer = offloaded(setup.build_optimizer, plan, None, shards)
        # Shards are views of full parameters, whose bytes are counted already.
        wrap_plan = dataclasses.replace(setup.wrap_plan, whole_bytes=0)
        setup = dataclasses.replace(setup, build_optimizer=build_optimizer, wrap_plan=wrap_plan)
        super().__init__(setup, group, shards, comm=self.comm)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Reduce gradients in every backward pass at level 2; level 1 keeps them whole until the last one.

        In a deterministic run, level 1 reduces as level 2 does.
        """
        with self._means_of_others.micro_batch(is_last):
            if self._means is not None:
                with self._means.micro_batch(is_last):
                    yield
                return
            self._gradients.start(is_active=is_last or self._plan.level == 2 or self._plan.deterministic)
            yield
            # Not in a finally: after an error on this rank, waiting for the others could last until the timeout.
            self._gradients.finish()

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        means = self._gradients if self._means is None else self._means
        with self._means_of_others.backward_pass(), means.backward_pass():
            yield

    def _facts(self) -> dict[str, int]:
        """Collect the facts; see ``ShardedModel``."""
        return super()._facts() | ({} if self._means is None else {OWN_GRADIENTS: self._means.changed()})

    def zero_grad(self) -> None:
        """Zero the gradients; see ``ShardedModel``."""
        super().zero_grad()
        if self._means is None:
            self._gradients.forget()

    def _after_update(self) -> None:
        """Send the rows that this rank has updated to the others."""
        self._parameters.share()

    def _after_shards_change(self) -> None:
        """Send the rows that this rank updates, which were just set, to the others."""
        self._parameters.share()
