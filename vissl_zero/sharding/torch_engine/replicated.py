"""Level 0: every rank holds everything, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.sharding.gradient_average import GradientAverage
from vissl_zero.sharding.plan import WrapPlan
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.strategy import OptimizerFactory
from vissl_zero.sharding.torch_engine.ordered import OrderedMeans


class Replicated(ShardedModel):
    """A whole model on every rank; on a single rank, the model and nothing else. See ``ShardedModel``.

    Attributes:
        means: of the gradients; in a deterministic run they are taken after every micro-batch, in the order of ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        wrap_plan: WrapPlan,
        device: torch.device,
    ):
        params = list(module.parameters())
        self.means = OrderedMeans(params) if plan.deterministic else GradientAverage(params, plan.timeout_s)
        # No group: gradients are averages on every rank, so each finds the same norms by itself.
        super().__init__(module, module, groups, build_optimizer, plan, wrap_plan, device, group=None)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged in the last micro-batch; in all of them where the order of sums is fixed."""
        return self.means.micro_batch(is_last)

    def _backward_pass(self) -> AbstractContextManager[None]:
        return self.means.backward_pass() if isinstance(self.means, GradientAverage) else nullcontext()
