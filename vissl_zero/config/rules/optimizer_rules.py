"""OPTIMIZER: which forms name one optimizer, and schedules that can be built and scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from vissl_zero.config.blocks.optimizer import Scheduler
from vissl_zero.config.derive.optimizer_plan import (
    KEYS,
    OPTIONAL_KEYS,
    base_name,
    head_rules,
    one_rate,
    optimizer_options,
    param_rules,
    peak,
    plain,
    uses_larc,
)
from vissl_zero.config.host import Host
from vissl_zero.config.options import typed_options
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import OPTIMIZERS, SCHEDULERS

_KEY = "config.OPTIMIZER"
_WRITE = f"Write {_KEY}.base_optimizer.name=sgd, for example, or {_KEY}.name=sgd with {_KEY}.use_zero=True."


def form(cfg: RunConfig, host: Host) -> list[Problem]:
    """One optimizer is named, once, or twice by the same name."""
    block, nested = cfg.OPTIMIZER, cfg.OPTIMIZER.base_optimizer.name
    if nested == "zero":
        must = "must be the optimizer whose state zero shards, not zero itself"
        return [Problem(f"{_KEY}.base_optimizer.name", "'zero'", must, "Write sgd, for example.")]
    if block.name != "zero":
        if nested and block.name and nested != block.name:
            got = f"{block.name!r} and base_optimizer.name {nested!r}"
            return [
                Problem(f"{_KEY}.name", got, "must name one optimizer", f"Write {_KEY}.name=zero, or leave one out.")
            ]
        return []
    found = []
    if block.use_zero is False:
        fix = f"Leave use_zero out, or write {_KEY}.name={nested or 'sgd'} for unsharded state."
        found.append(Problem(f"{_KEY}.use_zero", "False", "contradicts name: zero", fix))
    if nested is None:
        found.append(Problem(f"{_KEY}.base_optimizer", "", "must name the optimizer that zero shards", _WRITE))
    return found


def known(cfg: RunConfig, host: Host) -> list[Problem]:
    """The optimizer is known and has the keys it is given."""
    if form(cfg, host):
        return []
    if base_name(cfg.OPTIMIZER) not in OPTIMIZERS:
        return [OPTIMIZERS.unknown(base_name(cfg.OPTIMIZER))]
    try:
        options, _ = optimizer_options(cfg.OPTIMIZER)
    except ConfigError as error:
        return list(error.problems)
    found = []
    if options.get("nesterov") and not options.get("momentum"):
        fix = f"Give it a momentum, or write {_KEY}.nesterov=False."
        found.append(Problem(f"{_KEY}.nesterov", "True", "needs a momentum above 0", fix))
    betas = options.get("betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        found.append(
            Problem(f"{_KEY}.betas", str(betas), "must be two numbers from 0 to below 1", "Write [0.9, 0.999].")
        )
    return found


def larc(cfg: RunConfig, host: Host) -> list[Problem]:
    """LARC is not put on top of an optimizer that adapts its rates by itself."""
    block, found = cfg.OPTIMIZER, []
    if uses_larc(block) and base_name(block) == "lars":
        must = "cannot be put on top of lars, which adapts its rates by itself"
        found.append(Problem(f"{_KEY}.use_larc", "True", must, f"Write {_KEY}.use_larc=False, or use sgd."))
    return found


def groups(cfg: RunConfig, host: Host) -> list[Problem]:
    """Rates of several heads need groups of heads; parameters with rates of their own, keys that are known."""
    block = cfg.OPTIMIZER
    try:
        rules = param_rules(block)
    except ConfigError as error:
        return list(error.problems)
    for index, rule in enumerate(rules):
        if rule["constant_lr"] and block.param_schedulers.lr.name not in KEYS:
            must = f"needs a schedule whose peak is known, and {block.param_schedulers.lr.name} is one of your own"
            return [Problem(f"{_KEY}.param_groups[{index}].constant_lr", "True", must, "Leave it out.")]
    if found := _head_rules(cfg):
        return found
    if one_rate(block) and block.head_optimizer_params.lr_factors:
        fix = (
            f"Write lr_factors: [], or leave {_KEY}.construct_single_param_group_only and param_group_constructor out."
        )
        got = str(block.head_optimizer_params.lr_factors)
        must = "needs a group for each head, which this grouping of parameters does not have"
        return [Problem(f"{_KEY}.head_optimizer_params.lr_factors", got, must, fix)]
    return []


def _head_rules(cfg: RunConfig) -> list[Problem]:
    """linear_eval_heads has a block for each head, and nothing else says the heads' rates or decay."""
    block, key = cfg.OPTIMIZER, f"{_KEY}.linear_eval_heads"
    if block.param_group_constructor != "linear_eval_heads" or one_rate(block):
        return []
    try:
        rules = head_rules(block)
    except ConfigError as error:
        return list(error.problems)
    count = len(cfg.MODEL.HEAD.PARAMS)
    if len(rules) != count:
        must = f"must have a block for each of the {count} heads"
        return [Problem(key, f"{len(rules)} blocks", must, "Write {lr: 1.0} for a head like the others.")]
    others = {
        "head_optimizer_params.lr_factors": bool(block.head_optimizer_params.lr_factors),
        "head_optimizer_params.use_different_lr": block.head_optimizer_params.use_different_lr,
        "head_optimizer_params.use_different_wd": block.head_optimizer_params.use_different_wd,
        "param_schedulers.weight_decay": bool(block.param_schedulers.weight_decay.name),
    }
    must = "cannot go with linear_eval_heads, which says it for each head"
    return [Problem(f"{_KEY}.{name}", "", must, "Leave it out.") for name, is_set in others.items() if is_set]


_SCHEDULES = "config.OPTIMIZER.param_schedulers"


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
        found += _schedule(f"{_SCHEDULES}.{name}", asdict(schedule), cfg.OPTIMIZER.num_epochs)
    return found


def _schedule(key: str, schedule: Mapping[str, Any], num_epochs: int) -> list[Problem]:
    name = schedule.get("name")
    if not isinstance(name, str) or name not in SCHEDULERS:
        return [replace(SCHEDULERS.unknown(str(name)), key=f"{key}.name")]
    found = _missing(key, name, schedule)
    if found:
        return found
    if name == "multistep":
        return _multistep(key, schedule["values"], schedule["milestones"], num_epochs)
    if name == "composite":
        return _composite(key, schedule, num_epochs)
    return []


def _missing(key: str, name: str, schedule: Mapping[str, Any]) -> list[Problem]:
    """Keys that a part of a composite, a free block, lacks or does not have."""
    try:
        typed_options(Scheduler, schedule, key)
    except ConfigError as error:
        return list(error.problems)
    needed = [part for part in KEYS.get(name, ()) if part not in OPTIONAL_KEYS]
    fix = f"The {name} schedule needs {', '.join(needed)}."
    return [Problem(f"{key}.{part}", "", "must be given", fix) for part in needed if part not in schedule]


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
        return [
            Problem(key, got, "must have a length and an interval_scaling per part", "Give the lists the same length.")
        ]
    if not min(lengths) > 0 or not abs(sum(lengths) - 1) <= 1e-6:
        fix = "They are shares of the whole run, such as [0.1, 0.9]."
        return [Problem(f"{key}.lengths", str(list(lengths)), "must be positive and sum to 1", fix)]
    found: list[Problem] = []
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
        if schedule.name in KEYS and not _schedule(key, asdict(schedule), 10**9) and peak(plain(schedule)) <= 0:
            fix = "Write the schedule for base_value; its shape is kept."
            found.append(Problem(f"config.{key}", "", "needs a schedule that rises above 0", fix))
    return found


def peak_value(cfg: RunConfig, host: Host) -> list[Problem]:
    """OPTIMIZER.lr has a schedule that can be scaled to it."""
    value, schedule = cfg.OPTIMIZER.lr, cfg.OPTIMIZER.param_schedulers.lr
    if value is None:
        return []
    found = []
    if schedule.name not in KEYS:
        must = f"must be left out: the schedule {schedule.name} is not one that can be scaled"
        found.append(Problem("config.OPTIMIZER.lr", str(value), must, f"Write the rate into {_SCHEDULES}.lr."))
    elif not _schedule(_SCHEDULES, asdict(schedule), 10**9) and peak(plain(schedule)) <= 0:
        must = f"needs a schedule that rises above 0 ({_SCHEDULES}.lr)"
        found.append(Problem("config.OPTIMIZER.lr", str(value), must, "Its shape is kept, and its peak is moved."))
    return found


RULES = (form, known, larc, groups, well_formed, auto_scaling, peak_value)
