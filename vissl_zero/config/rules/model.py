"""Trunk and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vissl_zero.config.components.trunks import REGNET_PARAMETERS, RESNET_DEPTHS, TRUNK_BLOCKS, regnet_problems
from vissl_zero.config.derive.components import trunk_options
from vissl_zero.config.derive.weights import missing_weights
from vissl_zero.config.host import Host
from vissl_zero.config.options import component_keys, typed_options
from vissl_zero.config.rules.limits import at_least, one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import HEADS, TRUNKS

_HEADS = "config.MODEL.HEAD.PARAMS"


def trunk(cfg: RunConfig, host: Host) -> list[Problem]:
    """The trunk is known and has the keys it is given."""
    if cfg.MODEL.TRUNK.NAME not in TRUNKS:
        return [TRUNKS.unknown(cfg.MODEL.TRUNK.NAME)]
    if cfg.MODEL.TRUNK.NAME in TRUNK_BLOCKS and cfg.MODEL.TRUNK.PARAMS:
        fix = f"Write them under config.MODEL.TRUNK.{TRUNK_BLOCKS[cfg.MODEL.TRUNK.NAME]}."
        return [Problem("config.MODEL.TRUNK.PARAMS", str(cfg.MODEL.TRUNK.PARAMS), "is for trunks of your own", fix)]
    try:
        trunk_options(cfg)
    except ConfigError as error:
        return list(error.problems)
    return []


def regnet(cfg: RunConfig, host: Host) -> list[Problem]:
    """A RegNet has a name or all of its parameters, and they make one."""
    if cfg.MODEL.TRUNK.NAME != "regnet":
        return []
    block, key = cfg.MODEL.TRUNK.REGNET, "config.MODEL.TRUNK.REGNET"
    given = [name for name in REGNET_PARAMETERS if getattr(block, name) is not None]
    if block.name and given:
        fix = f"Leave out the name, or {', '.join(given)}."
        return [Problem(key, f"name and {', '.join(given)}", "must have a name or parameters, not both", fix)]
    missing = [name for name in REGNET_PARAMETERS if name not in given]
    if not block.name and missing:
        fix = f"Add {', '.join(missing)}, or write name: regnet_y_400mf."
        return [Problem(key, f"only {', '.join(given)}" if given else "", "must have a name or all parameters", fix)]
    return regnet_problems(block)


def frozen(cfg: RunConfig, host: Host) -> list[Problem]:
    """What is frozen for a time has a name and a number of steps."""
    key, found = "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP", []
    for entry in cfg.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP:
        pair = list(entry) if isinstance(entry, (list, tuple)) else []
        if [type(part) for part in pair] != [str, int] or pair[1] < 0:
            fix = "Write [[heads.0.prototypes0.weight, 313]], say."
            found.append(Problem(key, str(entry), "must hold pairs of a parameter's name and a number of steps", fix))
    return found


def resnet(cfg: RunConfig, host: Host) -> list[Problem]:
    """A ResNet is one of the published depths."""
    if cfg.MODEL.TRUNK.NAME != "resnet":
        return []
    block, key = cfg.MODEL.TRUNK.RESNETS, "MODEL.TRUNK.RESNETS"
    found = one_of(f"{key}.DEPTH", str(block.DEPTH), map(str, RESNET_DEPTHS))
    found += one_of(f"{key}.NORM", block.NORM, ("BatchNorm", "GroupNorm"))
    return found + at_least(f"{key}.WIDTH_MULTIPLIER", block.WIDTH_MULTIPLIER, 1)


def heads(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every head is ["name", {keys}], known, and has the keys it is given."""
    if not cfg.MODEL.HEAD.PARAMS:
        fix = 'Write [["swav_head", {dims: [...], num_clusters: [...]}]] or [["mlp", {dims: [...]}]].'
        return [Problem(_HEADS, "[]", "must list at least one head", fix)]
    return [problem for head in cfg.MODEL.HEAD.PARAMS for problem in _head(head)]


def _head(head: Any) -> list[Problem]:
    if not is_head(head):
        fix = 'Write a list of lists: [["mlp", {dims: [64, 10]}]].'
        return [Problem(_HEADS, str(head), 'must hold ["name", {key: value}]', fix)]
    name, options = head
    if name not in HEADS:
        return [HEADS.unknown(name)]
    try:
        typed_options(component_keys(HEADS, name), options, f"{_HEADS}.{name}")
    except ConfigError as error:
        return list(error.problems)
    return _dims(name, options)


def is_head(head: Any) -> bool:
    """Whether an entry of HEAD.PARAMS has the form ["name", {key: value}]."""
    is_pair = isinstance(head, Sequence) and not isinstance(head, str) and len(head) == 2
    return is_pair and isinstance(head[0], str) and isinstance(head[1], Mapping)


def _dims(name: str, options: Mapping[str, Any]) -> list[Problem]:
    if name not in ("mlp", "swav_head"):
        return []
    found, dims = [], list(options["dims"])
    if len(dims) < 2 or min(dims[1:]) < 1 or (dims[0] < 1 and dims[0] != -1):
        must = "must be two or more widths, from the trunk's features (-1: as many as it has) to the outputs"
        found.append(Problem(f"{_HEADS}.{name}.dims", str(dims), must, "Write dims: [features, ..., outputs]."))
    if name == "swav_head" and (not options["num_clusters"] or min(options["num_clusters"]) < 1):
        got = str(list(options["num_clusters"]))
        must = "must have at least 1 prototype in each layer"
        found.append(Problem(f"{_HEADS}.{name}.num_clusters", got, must, "Write num_clusters: [3000], say."))
    return found


def batch_norm(cfg: RunConfig, host: Host) -> list[Problem]:
    """The heads' batch norms have a positive eps."""
    momentum = cfg.MODEL.HEAD.BATCHNORM_MOMENTUM
    found = at_least("MODEL.HEAD.BATCHNORM_EPS", cfg.MODEL.HEAD.BATCHNORM_EPS, 0)
    if not 0 <= momentum <= 1:
        key = "config.MODEL.HEAD.BATCHNORM_MOMENTUM"
        found.append(Problem(key, str(momentum), "must be between 0 and 1", "Write 0.1, the usual value."))
    return found


def evaluation(cfg: RunConfig, host: Host) -> list[Problem]:
    """Settings of evaluation need their mode, as in VISSL, where they would be ignored without it."""
    settings, key = cfg.MODEL.FEATURE_EVAL_SETTINGS, "config.MODEL.FEATURE_EVAL_SETTINGS"
    if settings.EVAL_MODE_ON:
        return []
    names = ("FREEZE_TRUNK_ONLY", "EVAL_TRUNK_AND_HEAD")
    fix = f"Write {key}.EVAL_MODE_ON=true."
    return [Problem(f"{key}.{name}", "True", "needs EVAL_MODE_ON", fix) for name in names if getattr(settings, name)]


def weights(cfg: RunConfig, host: Host) -> Problem | None:
    """The weights to begin with are there."""
    return missing_weights(cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE)


RULES = (trunk, regnet, frozen, resnet, heads, batch_norm, evaluation, weights)
