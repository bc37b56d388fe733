"""Cross-key rules: each a small pure function of the configuration and the host, one topic a file.

All of them run, and all problems are reported together.
"""

from __future__ import annotations

from collections.abc import Callable

from vissl_zero.config.components.trunks import FURTHER_BLOCKS, TRUNK_BLOCKS
from vissl_zero.config.constraints import constraint_problems
from vissl_zero.config.host import Host
from vissl_zero.config.rules import (
    data_rules,
    model_rules,
    optimizer_rules,
    placement_rules,
    programs_rules,
    sharding_rules,
    slurm_rules,
    vissl_rules,
)
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem

Rule = Callable[[RunConfig, Host], Problem | list[Problem] | None]

RULES: tuple[Rule, ...] = (
    *data_rules.RULES,
    *model_rules.RULES,
    *optimizer_rules.RULES,
    *sharding_rules.RULES,
    *placement_rules.RULES,
    *slurm_rules.RULES,
    *programs_rules.RULES,
    *vissl_rules.RULES,
)


def problems(cfg: RunConfig, host: Host) -> list[Problem]:
    """Everything that is wrong with a configuration: values by themselves, then keys together; each problem once."""
    found = list(constraint_problems(cfg, "config", unread_blocks(cfg)))
    for rule in RULES:
        try:
            verdict = rule(cfg, host)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            if not found:
                raise
            continue  # it stumbles over a value that is among the problems already
        found += [verdict] if isinstance(verdict, Problem) else verdict or []
    return list(dict.fromkeys(found))


def unread_blocks(cfg: RunConfig) -> set[str]:
    """Paths of blocks that this run does not read: of other trunks and losses, and of what is switched off."""
    name = cfg.MODEL.TRUNK.NAME
    others = {*TRUNK_BLOCKS.values()} - {TRUNK_BLOCKS.get(name), FURTHER_BLOCKS.get(name)}
    unread = {f"config.MODEL.TRUNK.{block}" for block in others}
    unread |= {f"config.LOSS.{name}" for name in cfg.LOSS if name not in ("name", cfg.LOSS.get("name"))}
    schedules, head = cfg.OPTIMIZER.param_schedulers, cfg.OPTIMIZER.head_optimizer_params
    off = {
        "SLURM": not cfg.SLURM.USE_SLURM,
        "MODEL.GRAD_CLIP": not cfg.MODEL.GRAD_CLIP.USE_GRAD_CLIP,
        "OPTIMIZER.param_schedulers.lr_head": not head.use_different_lr,
        "OPTIMIZER.param_schedulers.weight_decay": not schedules.weight_decay.name,
        "OPTIMIZER.param_schedulers.weight_decay_head": not schedules.weight_decay_head.name,
    }
    return unread | {f"config.{path}" for path, is_off in off.items() if is_off}
