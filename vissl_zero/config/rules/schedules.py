"""OPTIMIZER.param_schedulers: schedules that can be built and scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from vissl_zero.config.blocks.schedulers import Scheduler
from vissl_zero.config.derive.schedules import KEYS, peak, plain
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import above_zero, one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.registry import SCHEDULERS

_KEY = "config.OPTIMIZER.param_schedulers"
_INTERVALS = ("step", "epoch")


def used(cfg: RunConfig) -> dict[str, Scheduler]:
    """The schedules that this run follows."""
    block = cfg.OPTIMIZER.param_schedulers
    found = {"lr": block.lr}
    if cfg.OPTIMIZER.head_optimizer_params.use_different_lr:
        found["lr_head"] = block.lr_head
    named = {"weight_decay": block.weight_decay, "weight_decay_head": block.weight_decay_head}
    return found | {name: schedule for name, schedule in named.items() if schedule.name}


def well_formed(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every schedule is known and has what it needs; parts of a composite too."""
    found: list[Problem] = []
    for name, schedule in used(cfg).items():
        found += _schedule(f"{_KEY}.{name}", asdict(schedule), cfg.OPTIMIZER.num_epochs)
    return found


def _schedule(key: str, schedule: Mapping[str, Any], num_epochs: int) -> list[Problem]:
    name = schedule.get("name")
    if not isinstance(name, str) or name not in SCHEDULERS:
        return [replace(SCHEDULERS.unknown(str(name)), key=f"{key}.name")]
    found = _missing(key, name, schedule)
    interval = schedule.get("update_interval")
    if interval is not None:
        found += one_of(f"{key}.update_interval".removeprefix("config."), str(interval), _INTERVALS)
    if found:
        return found
    if name == "multistep":
        return _multistep(key, schedule["values"], schedule["milestones"], num_epochs)
    if name == "composite":
        return _composite(key, schedule, num_epochs)
    return []


def _missing(key: str, name: str, schedule: Mapping[str, Any]) -> list[Problem]:
    """Keys that a part of a composite, a free block, lacks or does not have."""
    needed = [part for part in KEYS.get(name, ()) if part != "interval_scaling"]
    fix = f"The {name} schedule needs {', '.join(needed)}."
    found = [Problem(f"{key}.{part}", "", "must be given", fix) for part in needed if part not in schedule]
    known = {*Scheduler.__dataclass_fields__}
    unknown = [part for part in schedule if part not in known]
    return found + [
        Problem(f"{key}.{p}", "", "is not a key", did_you_mean(str(p), known).strip() or fix) for p in unknown
    ]


def _multistep(key: str, values: list[float], milestones: list[int], num_epochs: int) -> list[Problem]:
    if len(values) != len(milestones) + 1 or sorted(milestones) != list(milestones):
        got = f"values {list(values)}, milestones {list(milestones)}"
        fix = "Write one more value than milestones, the milestones ascending."
        return [Problem(key, got, "must have a value before, between and after the milestones", fix)]
    if milestones and milestones[-1] >= num_epochs:
        must = f"must lie before the end, config.OPTIMIZER.num_epochs={num_epochs}"
        return [
            Problem(
                f"{key}.milestones", str(list(milestones)), must, "Lower them, name another schedule, or train longer."
            )
        ]
    return []


def _composite(key: str, schedule: Mapping[str, Any], num_epochs: int) -> list[Problem]:
    parts, lengths, scaling = schedule["schedulers"], schedule["lengths"], schedule.get("interval_scaling") or []
    if not parts or len(lengths) != len(parts) or len(scaling) not in (0, len(parts)):
        got = f"{len(parts)} schedulers, {len(lengths)} lengths, {len(scaling)} interval_scaling"
        return [Problem(key, got, "must have a length and an interval_scaling per part", "Make the lists as long.")]
    if min(lengths) <= 0 or abs(sum(lengths) - 1) > 1e-6:
        fix = "They are shares of the whole run, such as [0.1, 0.9]."
        return [Problem(f"{key}.lengths", str(list(lengths)), "must be positive and sum to 1", fix)]
    found = [p for part in scaling for p in one_of(f"{key[7:]}.interval_scaling", part, ("rescaled", "fixed"))]
    for index, part in enumerate(parts):
        where = f"{key}.schedulers[{index}]"
        if isinstance(part, Mapping):
            found += _schedule(where, part, num_epochs)
        else:
            found.append(Problem(where, str(part), "must be a block with a name", "Write {name: linear, ...}."))
    return found


def auto_scaling(cfg: RunConfig, host: Host) -> list[Problem]:
    """Scaling by the batch has a base and something to scale."""
    found: list[Problem] = []
    for name, schedule in used(cfg).items():
        auto, key = schedule.auto_lr_scaling, f"OPTIMIZER.param_schedulers.{name}.auto_lr_scaling"
        if not auto.auto_scale:
            continue
        found += one_of(f"{key}.scaling_type", auto.scaling_type, ("linear", "sqrt"))
        found += above_zero(f"{key}.base_lr_batch_size", auto.base_lr_batch_size)
        found += above_zero(f"{key}.base_value", auto.base_value)
        if schedule.name in KEYS and not _schedule(key, asdict(schedule), 10**9) and peak(plain(schedule)) <= 0:
            fix = "Write the schedule for base_value; its shape is kept."
            found.append(Problem(f"config.{key}", "", "needs a schedule that rises above 0", fix))
    return found


RULES = (well_formed, auto_scaling)
