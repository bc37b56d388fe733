"""One base optimizer from every form of OPTIMIZER; docs/optimizer_forms.md is the table."""

from __future__ import annotations

from typing import Any

from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.derive.schedules import resolved_schedules
from vissl_zero.config.options import component_keys, typed_options
from vissl_zero.config.resolved import LarcPlan, OptimizerPlan
from vissl_zero.config.run import RunConfig
from vissl_zero.registry import OPTIMIZERS

_DEFAULT_WEIGHT_DECAY = 1e-4
# Keys that stand in the block itself; every other key of an optimizer stands in PARAMS.
_OWN_KEYS = ("momentum", "nesterov", "betas")
_BASE = "config.OPTIMIZER.base_optimizer"


def base_name(block: Optimizer) -> str:
    """Name of the optimizer that runs: the nested one, else the flat one, else sgd."""
    flat = None if block.name == "zero" else block.name
    return block.base_optimizer.name or flat or "sgd"


def uses_larc(block: Optimizer) -> bool:
    """Whether LARC is on; the nested block decides if it says so."""
    return bool(_nested_first(block, "use_larc"))


def weight_decay(block: Optimizer) -> float:
    """Weight decay of the trunk's regularised parameters."""
    value = _nested_first(block, "weight_decay")
    return _DEFAULT_WEIGHT_DECAY if value is None else float(value)


def optimizer_options(block: Optimizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The optimizer's own keys, typed and complete, and notes on keys it does not have.

    Raises:
        ConfigError: an unknown optimizer, unknown keys in PARAMS, values of a wrong type.
    """
    name = base_name(block)
    schema = component_keys(OPTIMIZERS, name)
    known = set(getattr(schema, "__dataclass_fields__", ()))
    given, notes = {}, []
    for key in _OWN_KEYS:
        value = _nested_first(block, key)
        if value is not None and key in known:
            given[key] = value
        elif value is not None:
            notes.append(f"config.OPTIMIZER: {key} has no effect on {name}.")
    given |= {**block.PARAMS, **block.base_optimizer.PARAMS}
    return typed_options(schema, given, f"{_BASE}.PARAMS"), tuple(notes)


def _nested_first(block: Optimizer, key: str) -> Any:
    nested = getattr(block.base_optimizer, key)
    return getattr(block, key) if nested is None else nested


def _larc(block: Optimizer) -> tuple[LarcPlan | None, tuple[str, ...]]:
    flat, nested = block.larc_config, block.base_optimizer.larc_config
    given = {key: getattr(block.larc_config, key) for key in vars(flat) if getattr(flat, key) is not None}
    given |= {key: value for key, value in vars(nested).items() if value is not None}
    if uses_larc(block):
        return LarcPlan(**given), ()
    return None, (
        "config.OPTIMIZER: LARC is off (use_larc is not True), so larc_config has no effect.",
    ) if given else ()


def optimizer_plan(cfg: RunConfig, global_batch: int) -> tuple[OptimizerPlan, tuple[str, ...]]:
    """The optimizer of a run, and what to say about it.

    Args:
        cfg: a configuration that passed the rules.
        global_batch: source images per optimizer step, for automatic scaling of the learning rate.
    """
    block = cfg.OPTIMIZER
    options, option_notes = optimizer_options(block)
    larc, larc_notes = _larc(block)
    decay, head = weight_decay(block), block.head_optimizer_params
    schedules = resolved_schedules(block, global_batch)
    plan = OptimizerPlan(
        name=base_name(block),
        options=options,
        larc=larc,
        weight_decay=decay,
        head_weight_decay=head.weight_decay if head.use_different_wd else decay,
        lr=schedules.lr,
        lr_head=schedules.lr_head,
        wd_schedule=schedules.weight_decay,
        wd_head_schedule=schedules.weight_decay_head,
        regularize_bn=block.regularize_bn,
        regularize_bias=block.regularize_bias,
        non_regularized=tuple(block.non_regularized_parameters),
    )
    return plan, (*option_notes, *larc_notes)
