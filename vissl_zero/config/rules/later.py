"""Keys that have their place in the tree and wait for the work behind them: refused when set."""

from __future__ import annotations

from vissl_zero.config.derive.placement import ranks
from vissl_zero.config.host import Host
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import HOOKS


def shard_groups(cfg: RunConfig, host: Host) -> Problem | None:
    """One shard group, of all ranks."""
    world_size = ranks(cfg, host)[0]
    if cfg.ZERO.SHARD_GROUP_SIZE in (-1, world_size):
        return None
    must = f"must be -1 or all {world_size} processes: this version shards over all of them"
    return Problem("config.ZERO.SHARD_GROUP_SIZE", str(cfg.ZERO.SHARD_GROUP_SIZE), must, "Write -1.")


def hooks(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every extra hook is registered."""
    return [HOOKS.unknown(name) for name in cfg.HOOKS.EXTRA if name not in HOOKS]


RULES = (shard_groups, hooks)
