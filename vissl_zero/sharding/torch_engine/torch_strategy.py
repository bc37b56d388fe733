"""The torch engine: averaged gradients at level 0, ``fully_shard`` at levels 1 to 3; CPU and GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.config.resolved import ShardingPlan, keeps_parameters_whole
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.bare import Fill
from vissl_zero.optim.adaptation import Adaptation
from vissl_zero.optim.elementwise import single_rounded
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.parameter_guard import num_hooks
from vissl_zero.sharding.prepare import prepare
from vissl_zero.sharding.sharded_model import ModelSetup
from vissl_zero.sharding.strategy import OptimizerFactory, Sharded, Strategy
from vissl_zero.sharding.torch_engine.fully_sharded import FullySharded
from vissl_zero.sharding.torch_engine.replicated import Replicated, ReplicatedParameters


@STRATEGIES.register("torch")
class TorchStrategy(Strategy):
    """Replicas at level 0, fully_shard at 1 to 3."""

    def _check(self, plan: ShardingPlan, device: torch.device) -> None:
        _check(plan)

    def _shard(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        device: torch.device,
        fill: Fill,
    ) -> Sharded:
        """See ``Strategy``. Collective; the process group must be up, but for level 0 on one rank.

        Raises:
            ConfigError: group sizes that do not divide the world.
            ModelsDifferError: the ranks hold different weights.
        """
        if plan.deterministic and not plan.needs_whole_tensors:  # those see the same tensors at every level
            build_optimizer = _single_rounded(build_optimizer)
        wrap_plan = prepare(model, plan, device)
        if plan.verbose and collectives.rank() == 0:
            logging.getLogger(__name__).info("%s", wrap_plan.describe())
        setup = ModelSetup(model, groups, build_optimizer, plan, wrap_plan, device, fill)
        if plan.level == 0:
            fill(model, "")
            model.to(device)
            return Replicated(setup)
        if keeps_parameters_whole(plan, wrap_plan.num_ranks, collectives.world_size(), device.type):
            fill(model, "")
            model.to(device)
            return ReplicatedParameters(setup)
        # Only here: the classes above keep the parameters themselves, and with them their hooks.
        _refuse_hooked(model)
        return FullySharded(setup)


def _refuse_hooked(model: nn.Module) -> None:
    """``fully_shard`` puts other tensors in the place of parameters, so a hook on one would never run."""
    hooked = [name for name, param in model.named_parameters() if num_hooks(param)]
    if hooked:
        must = "must have no hooks where fully_shard replaces parameters: they would never run"
        fix = "Put the hook on a module's output, or use ZeRO level 0, or level 1 or 2 on the CPU."
        raise ConfigError([Problem("model", f"{hooked[0]} has a hook", must, fix)])


def _single_rounded(build_optimizer: OptimizerFactory) -> OptimizerFactory:
    def factory(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, Adaptation | None]:
        optimizer, adaptation = build_optimizer(groups)
        return single_rounded(optimizer), adaptation

    return factory


def _check(plan: ShardingPlan) -> None:
    precision = plan.precision
    if plan.level == 0 and plan.offload_optimizer.device != "none":
        key, value = "config.ZERO.offload_optimizer_config.device", repr(plan.offload_optimizer.device)
        must = "needs ZeRO level 1 to 3: at level 0 every rank would stream the same whole state"
        raise ConfigError([Problem(key, value, must, "Write level 1, 2 or 3, or device: none.")])
    if plan.level == 0 and {precision.compute, precision.reduce} != {precision.master}:
        problem = Problem(
            "config.MODEL.FSDP_CONFIG.compute_dtype",
            precision.compute,
            f"must be {precision.master} at ZeRO level 0, where parameters have no second copy to compute with",
            "Set config.MODEL.AMP_PARAMS.USE_AMP=true for half precision by autocast, or config.ZERO.LEVEL=1 or above.",
        )
        raise ConfigError([problem])
