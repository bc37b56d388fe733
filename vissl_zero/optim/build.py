"""From a plan to the optimizer that runs on this rank's shards, and the layer-wise adaptation of their gradients."""

from __future__ import annotations

from typing import Any

import torch

from vissl_zero.config.resolved import OptimizerPlan
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.adaptation import Adaptation, Larc
from vissl_zero.registry import OPTIMIZERS

# What a component of OPTIMIZERS returns: an optimizer, alone or with an adaptation of its own.
Built = torch.optim.Optimizer | tuple[torch.optim.Optimizer, Adaptation]


def build_optimizer(
    plan: OptimizerPlan, groups: list[dict[str, Any]]
) -> tuple[torch.optim.Optimizer, Adaptation | None]:
    """The base optimizer of ``plan`` over ``groups``, and LARC or LARS if it has them.

    A component is called as ``build(groups, **options)`` and returns a ``torch.optim.Optimizer`` whose update of a
    tensor depends on that tensor alone (``optim/update_rule.py`` finds out), alone or as a pair with an ``Adaptation``.
    It must honour each group's ``lr`` and ``weight_decay``, which schedules set before every step.

    Args:
        plan: name, options and LARC.
        groups: torch's, each with "params", "lr", "weight_decay" and any other keys, which are kept.
    Raises:
        ConfigError: the optimizer refuses its options, or LARC is asked for on top of an optimizer with its own.
    """
    component = OPTIMIZERS.get(plan.name)
    try:
        built: Built = component.build(groups, **plan.options)
    except ValueError as error:  # torch's optimizers check their options so
        key = "config.OPTIMIZER.base_optimizer"
        problem = Problem(key, str(plan.options), f"{plan.name} refuses its options: {error}", "Correct the value.")
        raise ConfigError([problem]) from error
    optimizer, adaptation = built if isinstance(built, tuple) else (built, None)
    if plan.larc is None:
        return optimizer, adaptation
    if adaptation is not None:
        must = f"LARC cannot be put on top of {plan.name}, which adapts its rates by layer itself"
        fix = "Set config.OPTIMIZER.use_larc=False, or use sgd as the base optimizer."
        raise ConfigError([Problem("config.OPTIMIZER.use_larc", "True", must, fix)])
    return optimizer, Larc(plan.larc.trust_coefficient, plan.larc.clip, plan.larc.eps)
