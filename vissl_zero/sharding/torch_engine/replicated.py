"""Level 0: every rank holds everything, gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.sharding.data_parallel import DataParallel
from vissl_zero.sharding.plan import WrapPlan
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.strategy import OptimizerFactory
from vissl_zero.sharding.torch_engine.ordered import OrderedMeans


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
        self._parallel = DataParallel(module, device) if not plan.deterministic else None
        self._means = OrderedMeans(list(module.parameters()))
        model = module if self._parallel is None else self._parallel.model
        super().__init__(model, module, groups, build_optimizer, plan, wrap_plan, device, group=None)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """See ``DataParallel``; where the order of sums is fixed, gradients are averaged in every micro-batch."""
        return self._means.micro_batch() if self._parallel is None else self._parallel.micro_batch(is_last)
