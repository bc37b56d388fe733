"""TRAINER.DETERMINISTIC: what can give the same bits at every level, and what cannot."""

from __future__ import annotations

from vissl_zero.config.derive.optimizer import base_name
from vissl_zero.config.derive.placement import ranks
from vissl_zero.config.host import Host
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem

_KEY = "config.TRAINER.DETERMINISTIC"
ELEMENT_WISE = ("sgd", "lars", "adam", "adamw")


def reachable(cfg: RunConfig, host: Host) -> list[Problem]:
    """Engine, groups and optimizer are ones whose sums have one order."""
    if not cfg.TRAINER.DETERMINISTIC:
        return []
    found = []
    if cfg.ZERO.ENGINE == "fairscale":
        must = "cannot be had on fairscale, whose sums over ranks run in an order of their own"
        found.append(Problem(_KEY, "True", must, "Write config.ZERO.ENGINE=torch."))
    if cfg.ZERO.SHARD_GROUP_SIZE not in (-1, ranks(cfg, host)[0]):
        must = "cannot be had with shard groups, which add up inside the groups first"
        found.append(Problem(_KEY, "True", must, "Write config.ZERO.SHARD_GROUP_SIZE=-1."))
    if base_name(cfg.OPTIMIZER) not in ELEMENT_WISE:
        must = f"needs {', '.join(ELEMENT_WISE[:-1])} or {ELEMENT_WISE[-1]}, whose updates round element by element"
        found.append(Problem(_KEY, "True", must, "Use one of them."))
    return found


RULES = (reachable,)
