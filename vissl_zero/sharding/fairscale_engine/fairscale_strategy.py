"""The fairscale engine: OSS, ShardedDataParallel and FullyShardedDataParallel, levels 1 to 3.

What fairscale cannot do is refused here, each with what to use instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.collectives import world_size
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.bare import Fill
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.fairscale_engine.flat_sharded import FlatSharded
from vissl_zero.sharding.fairscale_engine.owned_by_rank import GradientSharded, OptimizerSharded
from vissl_zero.sharding.prepare import prepare
from vissl_zero.sharding.sharded_model import ModelSetup
from vissl_zero.sharding.strategy import OptimizerFactory, Sharded, Strategy

_TORCH = "Write config.ZERO.ENGINE=torch"


def problems(plan: ShardingPlan, device: torch.device) -> list[Problem]:
    """Everything in ``plan`` that this engine cannot run on ``device``; empty if it can."""
    found = []
    if plan.level == 0:
        must = "must be 1, 2 or 3 on the fairscale engine: at level 0 there is nothing to shard"
        found.append(Problem("config.ZERO.LEVEL", "0", must, f"{_TORCH}, which runs level 0."))
    if plan.level == 3 and not has_streams(device):
        must = "fairscale shards parameters (level 3) on CUDA only: it needs CUDA's streams"
        found.append(Problem("config.ZERO.ENGINE", "fairscale", must, f"{_TORCH}, which runs level 3 on any device."))
    return found + _precision(plan) + _placement(plan)


def has_streams(device: torch.device) -> bool:
    """Whether ``device`` has streams, which fairscale's FSDP needs."""
    return device.type == "cuda"


def _precision(plan: ShardingPlan) -> list[Problem]:
    precision = plan.precision
    if plan.level == 3 and precision.master != "float32":
        must = "must be float32 at level 3 of the fairscale engine, whose FSDP refuses parameters of any other type"
        fix = f"{_TORCH}, or config.ZERO.LEVEL=2."
        return [Problem("config.TRAINER.DTYPE", precision.master, must, fix)]
    if plan.level in (1, 2) and {precision.compute, precision.reduce} != {precision.master}:
        must = (
            f"must be {precision.master} at levels 1 and 2 of the fairscale engine, which keep one copy of parameters"
        )
        fix = (
            f"{_TORCH}, or config.ZERO.LEVEL=3, or config.MODEL.AMP_PARAMS.USE_AMP=true for half precision by autocast."
        )
        return [Problem("config.MODEL.FSDP_CONFIG.compute_dtype", precision.compute, must, fix)]
    return []


def _placement(plan: ShardingPlan) -> list[Problem]:
    found = []
    if plan.shard_group_size > 1 and plan.shard_group_size != world_size():
        must = "must be -1 on the fairscale engine, which shares one copy of the state among all ranks"
        found.append(Problem("config.ZERO.SHARD_GROUP_SIZE", str(plan.shard_group_size), must, f"{_TORCH}."))
    for kind, offload in (("optimizer", plan.offload_optimizer), ("param", plan.offload_params)):
        if offload.device != "none":
            key = f"config.ZERO.offload_{kind}_config.device"
            must = "must be none on the fairscale engine"
            found.append(Problem(key, offload.device, must, f"{_TORCH}, which offloads."))
    return found


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
        setup = ModelSetup(model, groups, build_optimizer, plan, wrap_plan, device, fill)
        sharded: Sharded
        if plan.level == 3:
            sharded = FlatSharded(setup)
        else:
            fill(model, "")
            model.to(device)
            sharded = OptimizerSharded(setup) if plan.level == 1 else GradientSharded(setup)
        if plan.verbose and collectives.rank() == 0:
            logging.getLogger(__name__).info("%s", sharded.describe())
        return sharded
