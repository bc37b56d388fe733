"""Cross-key rules: each a small pure function of the configuration and the host, one topic a file.

All of them run, and all problems are reported together.
"""

from __future__ import annotations

from collections.abc import Callable

from vissl_zero.config.host import Host
from vissl_zero.config.rules import (
    average,
    checkpoint,
    data,
    deterministic,
    images,
    later,
    loss,
    model,
    optimizer,
    placement,
    precision,
    schedules,
    sharding,
    slurm,
)
from vissl_zero.config.rules import vissl as vissl_rules
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem

Rule = Callable[[RunConfig, Host], Problem | list[Problem] | None]

RULES: tuple[Rule, ...] = (
    *data.RULES,
    *images.RULES,
    *model.RULES,
    *loss.RULES,
    *optimizer.RULES,
    *schedules.RULES,
    *sharding.RULES,
    *precision.RULES,
    *placement.RULES,
    *slurm.RULES,
    *checkpoint.RULES,
    *deterministic.RULES,
    *average.RULES,
    *later.RULES,
    *vissl_rules.RULES,
)


def problems(cfg: RunConfig, host: Host) -> list[Problem]:
    """Everything that is wrong with a configuration, in the order of the rules, each problem once."""
    found: list[Problem] = []
    for rule in RULES:
        verdict = rule(cfg, host)
        found += [verdict] if isinstance(verdict, Problem) else verdict or []
    return list(dict.fromkeys(found))
