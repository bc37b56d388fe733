"""Level 0: every rank holds everything, gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        self._is_graph_known = False
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

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Gradients are averaged in the backward pass of the last micro-batch, and in the very first one of all.

        DDP learns the static graph in a backward pass that communicates and fails if the first one does not. Averaging
        what is an average already changes nothing, so the sum of micro-batches stays right.
        """
        if self._ddp is None or is_last or not self._is_graph_known:
            yield
        else:
            with self._ddp.no_sync():
                yield
        self._is_graph_known = True


def _without_buffer_sync() -> dict[str, Any]:
    """DDP would overwrite every rank's running statistics by rank 0's before each forward pass; torch 2.13 renamed it.

    Batch norm is synchronised by ``sharding/batch_norm.py``, or differs between ranks on purpose.
    """
    new_name = "forward_sync_buffers"
    is_new = new_name in inspect.signature(DistributedDataParallel.__init__).parameters
    return {new_name if is_new else "broadcast_buffers": False}
