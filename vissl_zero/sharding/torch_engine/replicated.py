"""Level 0: every rank holds everything, gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vissl_zero import collectives
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.sharding.plan import WrapPlan
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.strategy import OptimizerFactory


class Replicated(ShardedModel):
    """A whole model on every rank; on a single rank, the model and nothing else. See ``ShardedModel``."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        wrap_plan: WrapPlan,
        device: torch.device,
    ):
        self._ddp: DistributedDataParallel | None = None
        if collectives.world_size() > 1:
            self._ddp = DistributedDataParallel(
                module,
                device_ids=[device] if device.type == "cuda" else None,
                **_without_buffer_sync(),
                gradient_as_bucket_view=True,
                # The first backward pass tells which parameters the loss does not use; without, their whole bucket
                # would never be reduced. find_unused_parameters would ask in every step, and takes whatever an output
                # that the loss ignores could reach for used.
                static_graph=True,
            )
        model = module if self._ddp is None else self._ddp
        super().__init__(model, module, groups, build_optimizer, plan, wrap_plan, device, group=None)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged in the backward pass of the last micro-batch."""
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()


def _without_buffer_sync() -> dict[str, bool]:
    """DDP would overwrite the running statistics of all ranks by rank 0's before each forward pass; torch 2.13 renamed it.

    Batch norm is synchronised by ``sharding/batch_norm.py``, or differs between ranks on purpose.
    """
    new_name = "forward_sync_buffers"
    is_new = new_name in inspect.signature(DistributedDataParallel.__init__).parameters
    return {new_name if is_new else "broadcast_buffers": False}
