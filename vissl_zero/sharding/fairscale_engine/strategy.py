"""The fairscale engine: OSS, ShardedDataParallel and FullyShardedDataParallel, levels 1 to 3."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.errors import ConfigError
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.fairscale_engine.fully_sharded import FlatSharded
from vissl_zero.sharding.fairscale_engine.limits import problems
from vissl_zero.sharding.fairscale_engine.owned_by_rank import GradientSharded, OptimizerSharded
from vissl_zero.sharding.materialize import Fill
from vissl_zero.sharding.prepare import prepare
from vissl_zero.sharding.strategy import OptimizerFactory, Sharded, Strategy


@STRATEGIES.register("fairscale")
class FairscaleStrategy(Strategy):
    """fairscale's OSS, ShardedDDP and FSDP, levels 1 to 3 (level 3 on CUDA)."""

    def _check(self, plan: ShardingPlan, device: torch.device) -> None:
        if found := problems(plan, device):
            raise ConfigError(found)

    def _shard(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        device: torch.device,
        fill: Fill,
    ) -> Sharded:
        """See ``Strategy``. Collective; the process group must be up.

        Raises:
            ConfigError: group sizes that do not divide the world.
            ModelsDifferError: the ranks hold different weights.
        """
        wrap_plan = prepare(model, plan, device)
        sharded: Sharded
        if plan.level == 3:
            sharded = FlatSharded(model, groups, build_optimizer, plan, wrap_plan, device, fill)
        else:
            fill(model, "")
            build = OptimizerSharded if plan.level == 1 else GradientSharded
            sharded = build(model.to(device), groups, build_optimizer, plan, wrap_plan, device)
        if plan.verbose and collectives.rank() == 0:
            logging.getLogger(__name__).info("%s", sharded.describe())
        return sharded
