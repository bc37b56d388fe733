"""The ZeRO level, from ``ZERO.LEVEL`` or from VISSL's switches."""

from __future__ import annotations

from vissl_zero.config.run import RunConfig
from vissl_zero.config.vissl_twins import TASK_LEVELS

_USE_SDP = "config.MODEL.SHARDED_DDP_SETUP.USE_SDP"
_AUTO_FSDP = "config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP"


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
    """The number in ``ZERO.LEVEL``; None for auto (and for anything that is no level, which a rule refuses)."""
    text = str(cfg.ZERO.LEVEL)
    return int(text) if text in {"0", "1", "2", "3"} else None


def level(cfg: RunConfig) -> tuple[int, tuple[str, ...]]:
    """The level, and a note for each switch that a number overrides."""
    chosen, found = chosen_level(cfg), switches(cfg)
    if chosen is None:
        return max(found.values(), default=0), ()
    notes = [
        f"config.ZERO.LEVEL={chosen} wins over {key}, which stands for level {meant}."
        for key, meant in found.items()
        if meant != chosen
    ]
    return chosen, tuple(notes)
