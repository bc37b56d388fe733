"""HOOKS.EMA_MODEL: the running average of the weights."""

from __future__ import annotations

from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import at_least
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem

_KEY = "HOOKS.EMA_MODEL"


def numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """Weights and shares are from 0 to 1."""
    block = cfg.HOOKS.EMA_MODEL
    shares = {"WARMUP": block.WARMUP, "DECAY": block.DECAY}
    return at_least(f"{_KEY}.UPDATE_ITER", block.UPDATE_ITER, 1) + [
        Problem(f"config.{_KEY}.{name}", str(value), "must be from 0 to 1", f"Correct config.{_KEY}.{name}.")
        for name, value in shares.items()
        if not 0 <= value <= 1
    ]


RULES = (numbers,)
