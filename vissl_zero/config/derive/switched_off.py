"""Keys that were set though what would read them is off or not there: named once, that nobody waits for an effect.

Keys of sharding are ``derive/sharding.py``'s, where the plan says more than a switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from vissl_zero.config.blocks.schedulers import Scheduler
from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.config.derive.schedules import KEYS
from vissl_zero.config.run import RunConfig

_OPTIMIZER = "OPTIMIZER.head_optimizer_params"
_SCHEDULES = "OPTIMIZER.param_schedulers"
# Switch -> what has an effect only while it is set (blocks stand for all of their keys).
_SWITCHES: dict[str, tuple[str, ...]] = {
    "MODEL.WEIGHTS_INIT.PARAMS_FILE": ("MODEL.WEIGHTS_INIT",),
    f"{_OPTIMIZER}.use_different_wd": (f"{_OPTIMIZER}.weight_decay",),
    f"{_OPTIMIZER}.use_different_lr": (f"{_SCHEDULES}.lr_head",),
    f"{_SCHEDULES}.weight_decay.name": (f"{_SCHEDULES}.weight_decay",),
    f"{_SCHEDULES}.weight_decay_head.name": (f"{_SCHEDULES}.weight_decay_head",),
    "HOOKS.EMA_MODEL.SAVE_EMA_MODEL": (
        "HOOKS.EMA_MODEL.UPDATE_ITER",
        "HOOKS.EMA_MODEL.WARMUP",
        "HOOKS.EMA_MODEL.DECAY",
    ),
    "NEAREST_NEIGHBOR.USE_KNN": (
        "NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS",
        "NEAREST_NEIGHBOR.TOPK",
        "NEAREST_NEIGHBOR.SIGMA",
        "NEAREST_NEIGHBOR.L2_NORM_FEATS",
        "NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES",
        "NEAREST_NEIGHBOR.MAX_TEST_IMAGES",
    ),
    "DISTRIBUTED.MAX_RESTARTS": ("DISTRIBUTED.MIN_PROC_PER_NODE",),
}


def switched_off(cfg: RunConfig) -> list[str]:
    """A sentence per switch that is off and has keys set away from their defaults, and per unread block."""
    notes = []
    for switch, keys in _SWITCHES.items():
        if not _value(cfg, switch) and (found := [key for key in keys if _value(cfg, key) != _value(_defaults(), key)]):
            notes.append(f"{_have(found)}: config.{switch} is {'not set' if _is_word(switch) else 'off'}.")
    trunk, unset = cfg.MODEL.TRUNK, _defaults().MODEL.TRUNK
    for name, block in TRUNK_BLOCKS.items():
        if trunk.NAME not in (name, "auto") and getattr(trunk, block) != getattr(unset, block):
            notes.append(f"{_have([f'MODEL.TRUNK.{block}'])}: the trunk is {trunk.NAME}.")
    if cfg.DISTRIBUTED.NUM_NODES == 1 and (found := [k for k in ("RUN_ID", "SECRET_FILE") if _is_set(cfg, k)]):
        notes.append(f"{_have([f'DISTRIBUTED.{key}' for key in found])}: one machine has nobody to meet.")
    return [*notes, *_schedules(cfg)]


def _schedules(cfg: RunConfig) -> Iterator[str]:
    """Keys of other schedules than the one that is named."""
    block, unset = cfg.OPTIMIZER.param_schedulers, Scheduler()
    every = {key for keys in KEYS.values() for key in keys}
    for name in ("lr", "lr_head", "weight_decay", "weight_decay_head"):
        schedule: Scheduler = getattr(block, name)
        if schedule.name not in KEYS or (
            name == "lr_head" and not cfg.OPTIMIZER.head_optimizer_params.use_different_lr
        ):
            continue
        other = sorted(every - {*KEYS[schedule.name]})
        if found := [key for key in other if getattr(schedule, key) != getattr(unset, key)]:
            yield f"{_have([f'{_SCHEDULES}.{name}.{key}' for key in found])}: the schedule is {schedule.name}."
        if name.startswith("weight_decay") and schedule.auto_lr_scaling.auto_scale:
            yield f"{_have([f'{_SCHEDULES}.{name}.auto_lr_scaling'])}: only learning rates are scaled."


def _have(keys: list[str]) -> str:
    return f"{', '.join(f'config.{key}' for key in keys)} {'has' if len(keys) == 1 else 'have'} no effect"


def _is_set(cfg: RunConfig, key: str) -> bool:
    return bool(getattr(cfg.DISTRIBUTED, key) != getattr(_defaults().DISTRIBUTED, key))


def _is_word(switch: str) -> bool:
    return not isinstance(_value(_defaults(), switch), bool)


@cache
def _defaults() -> RunConfig:
    return RunConfig()


def _value(cfg: RunConfig, path: str) -> Any:
    node: Any = cfg
    for part in path.split("."):
        node = getattr(node, part)
    return node
