"""VISSL's second names of what is used here, replaced by the one name of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vissl_zero.vissl.keys import ALIASES
from vissl_zero.vissl.methods import use_own_methods

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig


def use_own_names(cfg: RunConfig, chosen: Collection[str]) -> list[str]:
    """Replace VISSL's second names (``regnet_fsdp``, ...) and forms by the one of each, in place. Return notes.

    Args:
        cfg: configuration as composed.
        chosen: keys under ``config:`` that the command line sets: what a recipe may leave over is a mistake there.
    """
    notes = use_own_methods(cfg)
    model, teacher, optimizer = cfg.MODEL, cfg.DISTILLATION.TEACHER_MODEL, cfg.OPTIMIZER
    for block in (model, teacher):
        keys = block.WEIGHTS_INIT.STATE_DICT_KEY_NAME
        block.WEIGHTS_INIT.STATE_DICT_KEY_NAME = ".".join(map(str, keys)) if isinstance(keys, list) else str(keys or "")
        block.TRUNK.NAME = ALIASES["trunks"].get(block.TRUNK.NAME, block.TRUNK.NAME)
        block.HEAD.PARAMS = [_head(entry) for entry in block.HEAD.PARAMS]
    notes += _named_regnet(cfg.MODEL.TRUNK, chosen)
    settings, heads = model.FEATURE_EVAL_SETTINGS, model.HEAD.PARAMS
    has_map = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP and settings.EVAL_MODE_ON and settings.FREEZE_TRUNK_ONLY
    # VISSL applies several heads on one feature in turn. With a map of layers, there is one a layer.
    if len(heads) > 1 and not has_map and all(map(_is_head, heads)):
        model.HEAD.PARAMS = [_chain(heads)]
    for part in (optimizer, optimizer.base_optimizer):
        part.name = ALIASES["optimizers"].get(part.name or "", part.name)
    return notes


def _named_regnet(trunk: Any, chosen: Collection[str]) -> list[str]:
    """Let a RegNet's name count over its parameters, as in VISSL: overlays name another network than their base."""
    block, path = trunk.REGNET, "MODEL.TRUNK.REGNET"
    if trunk.NAME != "regnet" or block.name in (None, block.ANYNET):
        return []
    unset = type(block)()
    left = [key for key in block.FIXED_BY_NAME if getattr(block, key) != getattr(unset, key)]
    left = [key for key in left if f"{path}.{key}" not in chosen]
    for key in left:
        setattr(block, key, getattr(unset, key))
    keys = ", ".join(f"config.{path}.{key}" for key in left)
    have = "have" if len(left) > 1 else "has"
    return [f"{keys} {have} no effect: the name {block.name} says them, as in VISSL."] if left else []


def _chain(heads: list[Any]) -> list[Any]:
    first, last = heads[0][1].get("dims"), heads[-1][1].get("dims")
    dims = {"dims": [first[0], last[-1]]} if first and last else {}
    return ["chain", {"heads": heads, **dims}]


def _is_head(entry: Any) -> bool:
    is_pair = isinstance(entry, list) and len(entry) == 2
    return is_pair and isinstance(entry[0], str) and isinstance(entry[1], dict)


def _head(entry: Any) -> Any:
    """Read ``[name, keys]`` under the one name; anything else is for a rule to refuse."""
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [ALIASES["heads"].get(entry[0], entry[0]), *entry[1:]]
    if isinstance(entry, list) and entry and all(map(_is_head, entry)):  # VISSL's nested form
        heads = [_head(inner) for inner in entry]
        return _chain(heads) if len(heads) > 1 else heads[0]
    return entry
