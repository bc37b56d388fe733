"""The ZeRO level, from ``ZERO.LEVEL`` or from VISSL's switches."""

from __future__ import annotations

import re

from vissl_zero.config.run import RunConfig
from vissl_zero.config.vissl_twins import TASK_LEVELS

_USE_SDP = "config.MODEL.SHARDED_DDP_SETUP.USE_SDP"
_AUTO_FSDP = "config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP"
_TYPE = re.compile(r"ZeroRedundancyOptimizer_Level_([123])")
IMPLIED = "{key} is not given: 3, the one level whose parameters can be offloaded."
TYPES = "must be ZeroRedundancyOptimizer_Level_1, _2 or _3"


def typed_level(name: str) -> int | None:
    """The level that ColossalAI's name of it says; None: it is no such name."""
    found = _TYPE.fullmatch(name)
    return int(found[1]) if found else None


def implied_level(params_device: str) -> int | None:
    """The level of a block that names none but has parameters off the device, as on ColossalAI's page; else None."""
    return 3 if params_device in ("cpu", "nvme") else None


def switches(cfg: RunConfig) -> dict[str, int]:
    """VISSL's switches that are on -> the level each stands for."""
    found = {}
    if cfg.OPTIMIZER.name == "zero":
        found["config.OPTIMIZER.name=zero"] = 1
    elif cfg.OPTIMIZER.use_zero:
        found["config.OPTIMIZER.use_zero"] = 1
    if cfg.MODEL.SHARDED_DDP_SETUP.USE_SDP:
        found[_USE_SDP] = 2
    if cfg.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP:
        found[_AUTO_FSDP] = 3
    task = cfg.TRAINER.TASK_NAME  # type: ignore[attr-defined] # from the tables of VISSL's keys
    if task in TASK_LEVELS:
        found[f"config.TRAINER.TASK_NAME={task}"] = TASK_LEVELS[task]
    return found


def chosen_level(cfg: RunConfig) -> int | None:
    """The number in ``ZERO.LEVEL``, or in ``type``; None for auto (and for what is no level, which a rule refuses)."""
    text = str(cfg.ZERO.LEVEL)
    if text in {"0", "1", "2", "3"}:
        return int(text)
    return typed_level(cfg.ZERO.type) if text == "auto" and cfg.ZERO.type is not None else None


def level(cfg: RunConfig) -> tuple[int, tuple[str, ...]]:
    """The level, and a note for each switch that a number overrides."""
    chosen, found = chosen_level(cfg), switches(cfg)
    if chosen is None and not found and (implied := implied_level(cfg.ZERO.offload_param_config.device)):
        return implied, (IMPLIED.format(key="config.ZERO.LEVEL"),)
    if chosen is None:
        return max(found.values(), default=0), ()
    key = "config.ZERO.type" if str(cfg.ZERO.LEVEL) == "auto" else f"config.ZERO.LEVEL={chosen}"
    notes = [
        f"{key} wins over {switch}, which stands for level {meant}."
        for switch, meant in found.items()
        if meant != chosen
    ]
    return chosen, tuple(notes)
