"""OPTIMIZER: which forms name one optimizer, and which do not."""

from __future__ import annotations

from vissl_zero.config.derive.optimizer import base_name, optimizer_options, uses_larc, weight_decay
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import above_zero, at_least
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import OPTIMIZERS

_KEY = "config.OPTIMIZER"
_WRITE = f"Write {_KEY}.base_optimizer.name=sgd, say, or {_KEY}.name=sgd with {_KEY}.use_zero=True."


def form(cfg: RunConfig, host: Host) -> list[Problem]:
    """One optimizer is named, once or twice alike."""
    block, nested = cfg.OPTIMIZER, cfg.OPTIMIZER.base_optimizer.name
    if nested == "zero":
        must = "must be the optimizer whose state zero shards, not zero itself"
        return [Problem(f"{_KEY}.base_optimizer.name", "'zero'", must, "Write sgd, say.")]
    if block.name != "zero":
        if nested and block.name and nested != block.name:
            got = f"{block.name!r} and base_optimizer.name {nested!r}"
            return [
                Problem(f"{_KEY}.name", got, "must name one optimizer", f"Write {_KEY}.name=zero, or leave one out.")
            ]
        return []
    found = []
    if block.use_zero is False:
        fix = f"Leave use_zero out, or write {_KEY}.name={nested or 'sgd'} for unsharded state."
        found.append(Problem(f"{_KEY}.use_zero", "False", "contradicts name: zero", fix))
    if nested is None:
        found.append(Problem(f"{_KEY}.base_optimizer", "", "must name the optimizer that zero shards", _WRITE))
    return found


def known(cfg: RunConfig, host: Host) -> list[Problem]:
    """The optimizer is known and has the keys it is given."""
    if form(cfg, host):
        return []
    if base_name(cfg.OPTIMIZER) not in OPTIMIZERS:
        return [OPTIMIZERS.unknown(base_name(cfg.OPTIMIZER))]
    try:
        options, _ = optimizer_options(cfg.OPTIMIZER)
    except ConfigError as error:
        return list(error.problems)
    found = at_least("OPTIMIZER.momentum", options.get("momentum"), 0)
    found += above_zero("OPTIMIZER.base_optimizer.PARAMS.eps", options.get("eps"))
    if options.get("nesterov") and not options.get("momentum"):
        fix = f"Give it a momentum, or write {_KEY}.nesterov=False."
        found.append(Problem(f"{_KEY}.nesterov", "True", "needs a momentum above 0", fix))
    betas = options.get("betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        found.append(
            Problem(f"{_KEY}.betas", str(betas), "must be two numbers from 0 to below 1", "Write [0.9, 0.999].")
        )
    return found


def larc(cfg: RunConfig, host: Host) -> list[Problem]:
    """LARC is not put on top of an optimizer that adapts its rates by itself."""
    block, found = cfg.OPTIMIZER, []
    if uses_larc(block) and base_name(block) == "lars":
        must = "cannot be put on top of lars, which adapts its rates by itself"
        found.append(Problem(f"{_KEY}.use_larc", "True", must, f"Write {_KEY}.use_larc=False, or use sgd."))
    for where, config in (
        ("larc_config", block.larc_config),
        ("base_optimizer.larc_config", block.base_optimizer.larc_config),
    ):
        found += above_zero(f"OPTIMIZER.{where}.trust_coefficient", config.trust_coefficient)
        found += at_least(f"OPTIMIZER.{where}.eps", config.eps, 0)
    return found


def numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """Epochs and weight decays are in range."""
    block = cfg.OPTIMIZER
    return [
        *at_least("OPTIMIZER.num_epochs", block.num_epochs, 1),
        *at_least("OPTIMIZER.weight_decay", weight_decay(block), 0),
        *at_least("OPTIMIZER.head_optimizer_params.weight_decay", block.head_optimizer_params.weight_decay, 0),
    ]


RULES = (form, known, larc, numbers)
