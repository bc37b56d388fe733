"""Keys that have their place in the tree and wait for the work behind them: refused when set."""

from __future__ import annotations

from vissl_zero.config.host import Host
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import HOOKS


def hooks(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every extra hook is registered."""
    return [HOOKS.unknown(name) for name in cfg.HOOKS.EXTRA if name not in HOOKS]


RULES = (hooks,)
