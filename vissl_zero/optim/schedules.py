"""Schedules of the learning rate and the weight decay, from classy-vision, under VISSL's keys."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

# Costs 50 ms, since it does not import torchvision.
from classy_vision.optim.param_scheduler import (
    CompositeParamScheduler,
    ParamScheduler,
    UpdateInterval,
    build_param_scheduler,
)

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import SCHEDULERS

# Share of training done, 0 <= share < 1 -> value.
Progression = Callable[[float], float]

_KEY = "config.OPTIMIZER.param_schedulers"
# classy-vision adds WHERE_EPSILON to the share against rounding; above this limit, "step" would exceed its last value.
# Runs of less than half a million steps do not reach the limit before their end.
_LAST_PROGRESS = 1 - 2 * ParamScheduler.WHERE_EPSILON


def build_schedule(config: Mapping[str, Any], steps_per_epoch: int, num_epochs: int) -> Callable[[int], float]:
    """Build a schedule: a pure function of the optimizer step (from 0), so that a resumed run needs no state.

    A schedule that is updated per epoch keeps the value of the epoch's first step. The parts of a composite follow the
    composite's own ``update_interval``. Values after the last step are the last step's.

    Args:
        config: VISSL's dict: "name", the keys of that schedule, and "update_interval" ("step" or "epoch"; without it,
            "epoch" for constant, multistep and step, "step" for the others) and "stretch"
            (see that key). Keys of other schedules are ignored.
        steps_per_epoch: optimizer steps of one epoch.
        num_epochs: length of the whole schedule.
    Raises:
        ConfigError: the name is unknown, or the schedule cannot be built from its keys.
    """
    interval = _update_interval(config)
    progression = _build_progression(config, num_epochs)
    interval = interval or getattr(progression, "update_interval", UpdateInterval.STEP)
    per_epoch = interval == UpdateInterval.EPOCH
    unit = steps_per_epoch if per_epoch else 1
    num_units = (num_epochs if per_epoch else num_epochs * steps_per_epoch) * float(config.get("stretch") or 1.0)

    def value(step: int) -> float:
        return float(progression(min(step // unit / num_units, _LAST_PROGRESS)))

    return value


def _update_interval(config: Mapping[str, Any]) -> UpdateInterval | None:
    """Return the configured interval; None if it is not set."""
    value = config.get("update_interval")
    if value is None:
        return None
    try:
        return UpdateInterval(value)
    except ValueError as error:
        must = "update_interval must be step or epoch"
        raise ConfigError([Problem(_KEY, repr(value), must, "Choose one of them.")]) from error


def _build_progression(config: Mapping[str, Any], num_epochs: int) -> Progression:
    # A copy, because classy-vision's composite modifies its lengths in place. Null means that a key is not set.
    options = {key: value for key, value in copy.deepcopy(dict(config)).items() if value is not None}
    if "name" not in options:
        raise ConfigError(
            [Problem(_KEY, str(options), "a schedule must have a name", f"Known: {', '.join(SCHEDULERS)}.")]
        )
    component = SCHEDULERS.get(options["name"])
    try:
        progression: Progression = component.build(options, num_epochs)
    except (ValueError, TypeError, KeyError, AssertionError) as error:  # classy-vision raises all of these
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        must = f"the {options['name']} schedule cannot be built: {reason}"
        fix = "See docs/optimizers.md for the keys of each schedule."
        raise ConfigError([Problem(_KEY, str(options), must, fix)]) from error
    return progression


def _single(config: dict[str, Any], num_epochs: int) -> Progression:
    """Build a classy-vision schedule by its name and keys."""
    # classy-vision's multistep needs the number of epochs to place its milestones; the other schedules ignore it.
    scheduler: Progression = build_param_scheduler({**config, "num_epochs": num_epochs})
    return scheduler


for _name in ("constant", "cosine", "linear", "multistep", "step"):
    SCHEDULERS.register(_name)(_single)


@SCHEDULERS.register("cosine_warm_restart")
def cosine_warm_restart(config: dict[str, Any], num_epochs: int) -> Progression:
    """Build a sequence of cosines (https://arxiv.org/abs/1608.03983), as VISSL's schedule of this name.

    Args:
        config: "start_value", "end_value", "restart_interval_length" (of half a wave, a share of the schedule),
            "wave_type" ("half": the next wave starts at its top; "full": the value rises again before it falls),
            "lr_multiplier" (ratio of successive tops) and "is_adaptive" (the tops follow one cosine over the schedule).
        num_epochs: not used.
    """
    first, last, length = config["start_value"], config["end_value"], config["restart_interval_length"]
    wave, factor = config.get("wave_type", "half"), config.get("lr_multiplier", 1.0)
    if wave not in ("half", "full") or not 0 < length <= 1:
        raise ValueError(f"wave_type {wave} must be half or full, restart_interval_length {length} above 0, at most 1")
    period = 2 * length if wave == "full" else length
    restarts = [0.0, *(length + n * period for n in range(math.ceil((1 - length) / period)))]

    def top(index: int) -> float:
        if not config.get("is_adaptive", False):
            return float(first * factor**index)
        shift = length if wave == "full" else 0.0
        return float(last + 0.5 * (first - last) * (1 + math.cos(math.pi * (shift + restarts[index]))))

    tops = [top(index) for index in range(len(restarts))]

    def value(where: float) -> float:
        highest = tops[max(bisect.bisect(restarts, where) - 1, 0)]
        at = (where % length if wave == "half" else where) / length
        return float(last + 0.5 * (highest - last) * (1 + math.cos(math.pi * at)))

    return value


@SCHEDULERS.register("composite")
def composite(config: dict[str, Any], num_epochs: int) -> Progression:
    """Build a sequence of schedules, each for its share of training.

    Args:
        config: "schedulers", "lengths" (shares, which sum to 1) and "interval_scaling": for each part "rescaled" (it
            runs from its start to its end; the default) or "fixed" (as if it had started with the training).
        num_epochs: length of the whole schedule.
    """
    parts, lengths = config["schedulers"], list(config["lengths"])
    scaling = list(config.get("interval_scaling") or ["rescaled"] * len(parts))
    if len(scaling) != len(parts):
        raise ValueError(f"{len(parts)} schedulers, {len(scaling)} entries in interval_scaling")
    if any(length <= 0 for length in lengths):
        raise ValueError(f"lengths must be positive, got {lengths}")
    return CompositeParamScheduler([_build_progression(part, num_epochs) for part in parts], lengths, scaling)
