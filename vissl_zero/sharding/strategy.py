"""The entry to every engine: checks plan, model and optimizer, then shards the model."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.bare import Fill, materialize_
from vissl_zero.optim.adaptation import OptimizerFactory
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import UpdateRule, update_rule
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.checks.replica_check import equal_values
from vissl_zero.sharding.model.float8 import require_float8
from vissl_zero.sharding.model.prepare import prepare
from vissl_zero.sharding.offload.state_place import require_streamable
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel

_WHOLE_TENSORS = (
    "The optimizer needs full tensors: each is gathered to one rank, updated there and sent back. A step moves "
    "gradients once more and parameters twice more than with an element-wise optimizer; state is 1/N on each rank."
)


class Strategy(ABC):
    """Turns a built model into a ``ShardedModel``. Registered in ``STRATEGIES`` under the engine's name."""

    def shard(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        device: torch.device,
        fill: Fill | None = None,
    ) -> ShardedModel:
        """Shard ``model`` (initialized, on any device, equal on all ranks) as ``plan`` says.

        Args:
            model: whole model; it is changed in place.
            groups: parameter groups by full parameter name; every trainable parameter in exactly one.
            build_optimizer: called with the local shards. Above level 0 it is called with tiny tensors first, to test
                whether its update may run on a part of a tensor.
            plan: level, thresholds, precision.
            device: where to train.
            fill: initializes parameters on the meta device, unit by unit; by default through ``reset_parameters``.
        Raises:
            ConfigError: the combination cannot be run, with the reason and what to use instead; the model is as it
                was.
            ModelsDifferError: the ranks hold different weights.
        """
        if problems := [*_problems_at_level_0(plan), *self._problems(plan, device)]:
            raise ConfigError(problems)
        require_float8(model, plan.float8, device)
        # Before prepare, which changes the model: a refusal must leave it as it was.
        rule = update_rule_of(build_optimizer, model, groups, plan)
        if rule is UpdateRule.PER_TENSOR:
            plan = dataclasses.replace(plan, needs_whole_tensors=True)
            if collectives.rank() == 0 and plan.level:
                logging.getLogger(__name__).warning("%s", _WHOLE_TENSORS)
        # Meta parameters get their values during sharding, so they cannot be compared across ranks before it.
        with equal_values(fill or partial(materialize_, seed=plan.seed), model, device) as checked:
            wrap_plan = prepare(model, plan, device)
            sharded = self._shard(ModelSetup(model, groups, build_optimizer, plan, wrap_plan, device, checked))
        if plan.verbose and collectives.rank() == 0:
            logging.getLogger(__name__).info("%s", sharded.describe())
        return sharded

    def _problems(self, plan: ShardingPlan, device: torch.device) -> list[Problem]:
        """List everything in ``plan`` that this engine cannot run on ``device``; empty if it can."""
        return []

    @abstractmethod
    def _shard(self, setup: ModelSetup) -> ShardedModel:
        """Shard the prepared model. Collective; needs a process group, except at level 0 on one rank."""


def _problems_at_level_0(plan: ShardingPlan) -> list[Problem]:
    """List the settings that need a level above 0, where state is sharded and parameters have a second copy."""
    if plan.level:
        return []
    problems, precision = [], plan.precision
    if plan.offload_optimizer.device != "none":
        key, value = "config.ZERO.offload_optimizer_config.device", repr(plan.offload_optimizer.device)
        must = "needs ZeRO level 1 to 3: at level 0 every rank would stream the same whole state"
        problems.append(Problem(key, value, must, "Write level 1, 2 or 3, or device: none."))
    if not precision.rounding and {precision.compute, precision.reduce} != {precision.master}:
        key, value = "config.MODEL.FSDP_CONFIG.compute_dtype", precision.compute
        must = f"must be {precision.master} at ZeRO level 0, where parameters have no second copy to compute with"
        amp = "config.MODEL.AMP_PARAMS.USE_AMP=true"
        fix = f"Set {amp} for half precision by autocast, or config.ZERO.LEVEL=1 or above."
        problems.append(Problem(key, value, must, fix))
    return problems


def update_rule_of(
    build_optimizer: OptimizerFactory, model: nn.Module, groups: Sequence[ParamGroup], plan: ShardingPlan
) -> UpdateRule:
    """Test whether an update of one element depends on other elements. Return the rule (``optim/update_rule.py``).

    Level 0 needs no test, unless the run is deterministic or rounds parameters to bfloat16.

    Args:
        build_optimizer: called with tiny tensors that have as many dimensions as the parameters.
        model: whole, on any device.
        groups: parameter groups by full name.
        plan: level, engine, precision and offload of the run.
    Raises:
        ConfigError: the update couples tensors, cannot be tested, needs full tensors where ``plan`` cannot provide
            them, or cannot be streamed from the disk that ``plan`` names.
    """
    if plan.level == 0 and not (plan.deterministic or plan.precision.rounding):
        return UpdateRule.ELEMENT_WISE
    params = dict(model.named_parameters())
    shapes = [[tuple(params[name].shape) for name in group.params] for group in groups]
    optimizer, _ = build_optimizer(
        [
            {
                "name": group.name,
                # The trial makes tensors of its own: only the number of dimensions matters to the constructor. Their
                # values tell state that is a copy of the parameter from state that is zero.
                "params": [nn.Parameter(torch.full([min(n, 2) for n in shape], 1 / 7)) for shape in group_shapes],
                "lr": 0.0,
                "weight_decay": group.weight_decay,
            }
            for group, group_shapes in zip(groups, shapes, strict=True)
        ]
    )
    # Streaming and fairscale's FSDP hand the optimizer 1-d runs of elements, whatever the parameter's shape.
    is_on_disk = plan.offload_optimizer.is_on_disk or plan.offload_params.is_on_disk
    is_flattened = (plan.engine == "fairscale" and plan.level == 3) or is_on_disk
    rule = update_rule(optimizer, shapes, is_flattened=is_flattened or bool(plan.precision.rounding))
    if rule is UpdateRule.PER_TENSOR and plan.precision.rounding:
        must = "updates full tensors, which cannot go with parameters in bfloat16: they are updated piece by piece"
        fix = "Use an element-wise optimizer such as AdamW, or config.TRAINER.DTYPE=float32 (no zero.rounding)."
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, fix)])
    if rule is UpdateRule.PER_TENSOR and plan.engine == "fairscale":
        name, must = type(optimizer).__name__, "updates full tensors, which cannot go with the fairscale engine"
        fix = "Use an element-wise optimizer such as AdamW, or ZERO.ENGINE: torch."
        raise ConfigError([Problem("optimizer", name, must, fix)])
    if is_on_disk:
        block = "offload_optimizer_config" if plan.offload_optimizer.is_on_disk else "offload_param_config"
        require_streamable(optimizer, f"{block}.device", is_whole=rule is UpdateRule.PER_TENSOR)
    return rule
