"""The loss is known, has its keys, and what its method asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from vissl_zero.config.derive.components import loss_options, method_of
from vissl_zero.config.host import Host
from vissl_zero.config.run import RunConfig
from vissl_zero.config.vissl import OTHER_LOSSES
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import LOSSES


def known(cfg: RunConfig, host: Host) -> list[Problem]:
    """The loss is known and has the keys it is given; no other block is mistyped."""
    name = cfg.LOSS.get("name")
    found = [
        Problem(f"config.LOSS.{key}", "", "is not the name of a loss", did_you_mean(key, LOSSES).strip() or _known())
        for key in cfg.LOSS
        if key != "name" and key not in LOSSES and key not in OTHER_LOSSES
    ]
    if not isinstance(name, str) or name not in LOSSES:
        return [LOSSES.unknown(str(name)), *found]
    wrong = [key for key, block in cfg.LOSS.items() if key != "name" and not _is_block(block)]
    for key in wrong:
        fix = f"Write config.LOSS.{key}.<key>=<value>."
        found.append(Problem(f"config.LOSS.{key}", str(cfg.LOSS[key]), "must be a block of keys", fix))
    if name in wrong:
        return found
    try:
        loss_options(cfg)
    except ConfigError as error:
        found += error.problems
    return found


def _is_block(value: object) -> bool:
    return value is None or isinstance(value, Mapping) or is_dataclass(value)


def _known() -> str:
    return f"Known: {', '.join(LOSSES)}."


def method(cfg: RunConfig, host: Host) -> list[Problem]:
    """What the method says of the recipe."""
    name = str(cfg.LOSS.get("name"))
    spec = method_of(name)
    return [] if spec is None or not isinstance(cfg.LOSS.get(name), spec.losses[name]) else spec.problems(cfg, host)


RULES = (known, method)
