"""Schedules after automatic scaling by the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.blocks.schedulers import Scheduler

# Keys that each schedule reads; those of the others are left out of the resolved configuration.
KEYS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "linear": ("start_value", "end_value"),
    "cosine": ("start_value", "end_value"),
    "step": ("values",),
    "multistep": ("values", "milestones"),
    "composite": ("schedulers", "lengths", "interval_scaling"),
}
_VALUES = ("value", "start_value", "end_value")


@dataclass(frozen=True)
class Schedules:
    """Schedules of a run as plain dicts; None: no schedule."""

    lr: dict[str, Any]
    lr_head: dict[str, Any]
    weight_decay: dict[str, Any] | None
    weight_decay_head: dict[str, Any] | None


def resolved_schedules(block: Optimizer, global_batch: int) -> Schedules:
    """All schedules of OPTIMIZER, learning rates scaled by the global batch where asked for."""
    schedulers, head = block.param_schedulers, block.head_optimizer_params
    lr = scaled(schedulers.lr, global_batch)
    decay = plain(schedulers.weight_decay) if schedulers.weight_decay.name else None
    decay_head = None if head.use_different_wd else decay
    if schedulers.weight_decay_head.name:
        decay_head = plain(schedulers.weight_decay_head)
    return Schedules(
        lr=lr,
        lr_head=scaled(schedulers.lr_head, global_batch) if head.use_different_lr else lr,
        weight_decay=decay,
        weight_decay_head=decay_head,
    )


def scaled(scheduler: Scheduler, global_batch: int) -> dict[str, Any]:
    """A schedule, all of it multiplied by one factor if auto_scale, so that its shape (warm-up included) stays.

    The peak becomes ``base_value * global_batch / base_lr_batch_size``, or the root of that ratio:
    https://arxiv.org/abs/1706.02677.
    """
    schedule, auto = plain(scheduler), scheduler.auto_lr_scaling
    if not auto.auto_scale:
        return schedule
    ratio = global_batch / auto.base_lr_batch_size
    wanted = auto.base_value * (sqrt(ratio) if auto.scaling_type == "sqrt" else ratio)
    return _multiplied(schedule, wanted / peak(schedule))


def plain(scheduler: Scheduler) -> dict[str, Any]:
    """A schedule as the dict that builds it: its name, its own keys, its update interval."""
    return _own_keys(asdict(scheduler))


def _own_keys(schedule: Mapping[str, Any]) -> dict[str, Any]:
    name = schedule["name"]
    keys = KEYS.get(name, tuple(key for key in schedule if key not in ("name", "auto_lr_scaling", "update_interval")))
    kept = {"name": name, **{key: schedule[key] for key in keys if key in schedule}}
    if name == "composite":
        kept["schedulers"] = [_own_keys(part) for part in schedule["schedulers"]]
    if schedule.get("update_interval"):
        kept["update_interval"] = schedule["update_interval"]
    return kept


def peak(schedule: Mapping[str, Any]) -> float:
    """The largest value a schedule takes."""
    if schedule["name"] == "composite":
        return max((peak(part) for part in schedule["schedulers"]), default=0.0)
    return max([*(schedule[key] for key in _VALUES if key in schedule), *schedule.get("values", [])], default=0.0)


def _multiplied(schedule: dict[str, Any], factor: float) -> dict[str, Any]:
    result = dict(schedule)
    for key in _VALUES:
        if key in result:
            result[key] = result[key] * factor
    if "values" in result:
        result["values"] = [value * factor for value in result["values"]]
    if "schedulers" in result:
        result["schedulers"] = [_multiplied(part, factor) for part in result["schedulers"]]
    return result
