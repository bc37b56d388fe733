"""VISSL's keys that are not used here, and the second names of what is: read from ``vissl_keys.yaml``.

A typed dataclass per block says what is used. The rest of VISSL's tree comes from that file, so that a recipe written
for VISSL composes and a mistyped key is still refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from vissl_zero.config.components.trunks import ANYNET, FIXED_BY_NAME
from vissl_zero.config.vissl_methods import use_own_methods

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class VisslKey:
    """One key of the tables.

    Attributes:
        path: under ``config:``, such as ``DATA.TRAIN.STRATIFIED_SAMPLER.ENABLED``.
        allowed: values that change nothing here; the first is the default.
        is_refused: any other value is refused, because it would change the result; else it has no effect.
        why: a sentence.
    """

    path: str
    allowed: tuple[Any, ...]
    is_refused: bool
    why: str


def _read() -> dict[str, Any]:
    text = (files("vissl_zero.config") / "vissl_keys.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


def _tree(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Entries of the file as one tree of defaults."""
    tree: dict[str, Any] = {}
    for path, entry in _paths(entries):
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = _default(entry["default"])
    return tree


def _paths(entries: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in entries:
        splits = ("TRAIN", "TEST") if "*" in entry["key"] else ("",)
        yield from ((entry["key"].replace("*", split), entry) for split in splits)


def _default(value: Any) -> Any:
    if isinstance(value, dict) and [*value] == ["one_of"]:
        return OneOf(*value["one_of"])
    return {key: _default(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class OneOf:
    """Values that are all fine; the first is the default."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)


_TABLES = _read()
REFUSED, NO_EFFECT = _tree(_TABLES["refused"]), _tree(_TABLES["no_effect"])
OTHER_LOSSES: frozenset[str] = frozenset(_TABLES["other_losses"])
ALIASES: dict[str, dict[str, Any]] = _TABLES["aliases"]
# What is meant otherwise than in VISSL: key (with * for a part), values it holds for (absent: all), and a sentence.
DIFFERENCES: list[dict[str, Any]] = _TABLES["differs"]
# A part of an internal file's name -> where the same file is public.
PUBLIC_FILES: dict[str, str] = _TABLES["public_files"]
TASK_LEVELS: dict[str, int] = ALIASES["task_levels"]


@cache
def vissl_keys() -> tuple[VisslKey, ...]:
    """Every key of both tables."""
    found = []
    for name in ("refused", "no_effect"):
        for start, entry in _paths(_TABLES[name]):
            for path, value in _leaves(_default(entry["default"]), start):
                allowed = value.values if isinstance(value, OneOf) else (value,)
                found.append(VisslKey(path, allowed, name == "refused", entry["why"]))
    return tuple(found)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def with_vissl_keys(path: str) -> Callable[[type[T]], type[T]]:
    """Class decorator, above ``@dataclass``: add the tables' keys under ``path`` that the class does not have itself.

    Args:
        path: of the block under ``config:``; empty for the root.
    """

    def decorate(cls: type[T]) -> type[T]:
        return _extend(cls, path, [_below(REFUSED, path), _below(NO_EFFECT, path)])

    return decorate


def _below(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split(".") if path else []:
        tree = tree.get(key, {})
    return tree


def _extend(cls: type[T], path: str, trees: list[Mapping[str, Any]]) -> type[T]:
    own = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    names = [name for name in dict.fromkeys(name for tree in trees for name in tree) if name not in own]
    extra = [_field(name, f"{path}.{name}", [tree[name] for tree in trees if name in tree]) for name in names]
    extended = make_dataclass(cls.__name__, extra, bases=(cls,))
    extended.__module__, extended.__doc__ = cls.__module__, cls.__doc__
    return extended


def _field(name: str, path: str, values: list[Any]) -> tuple[str, Any, Any]:
    if isinstance(values[0], dict) and any(values):
        block: type = _extend(_empty_block(path), path, values)
        return name, block, field(default_factory=block)
    value = values[0].values[0] if isinstance(values[0], OneOf) else values[0]
    if isinstance(value, dict):
        return name, dict[str, Any], field(default_factory=dict)
    # Any: a value that has no effect, or is compared with its default, needs no type.
    return name, Any, field(default_factory=lambda: copy.deepcopy(value))


def _empty_block(path: str) -> type:
    no_fields: list[tuple[str, Any]] = []
    block = make_dataclass(path.replace(".", "_"), no_fields)
    block.__module__ = __name__  # where it is not to be found: jobs of a sweep get it pickled by value
    return block


def use_own_names(cfg: RunConfig, chosen: Collection[str] = ()) -> list[str]:
    """Replace VISSL's second names (``regnet_fsdp``, ...) and forms by the one of each, in place; returns notes.

    Args:
        cfg: as composed.
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
    model.HEAD.PARAMS = _chained(cfg, model.HEAD.PARAMS)
    for part in (optimizer, optimizer.base_optimizer):
        part.name = ALIASES["optimizers"].get(part.name or "", part.name)
    return notes


def _named_regnet(trunk: Any, chosen: Collection[str]) -> list[str]:
    """Of a RegNet's name and parameters the name counts, as in VISSL: overlays name another network than their base."""
    block, path = trunk.REGNET, "MODEL.TRUNK.REGNET"
    if trunk.NAME != "regnet" or block.name in (None, ANYNET):
        return []
    unset = type(block)()
    left = [key for key in FIXED_BY_NAME if getattr(block, key) != getattr(unset, key)]
    left = [key for key in left if f"{path}.{key}" not in chosen]
    for key in left:
        setattr(block, key, getattr(unset, key))
    keys = ", ".join(f"config.{path}.{key}" for key in left)
    have = "have" if len(left) > 1 else "has"
    return [f"{keys} {have} no effect: the name {block.name} says them, as in VISSL."] if left else []


def _chained(cfg: RunConfig, heads: list[Any]) -> list[Any]:
    """Several heads on one feature as one: VISSL applies them one after another. With a map of layers, one a layer."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    has_map = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP and settings.EVAL_MODE_ON and settings.FREEZE_TRUNK_ONLY
    return heads if has_map or len(heads) < 2 or not all(map(_is_head, heads)) else [_chain(heads)]


def _chain(heads: list[Any]) -> list[Any]:
    first, last = heads[0][1].get("dims"), heads[-1][1].get("dims")
    dims = {"dims": [first[0], last[-1]]} if first and last else {}
    return ["chain", {"heads": heads, **dims}]


def _is_head(entry: Any) -> bool:
    is_pair = isinstance(entry, list) and len(entry) == 2
    return is_pair and isinstance(entry[0], str) and isinstance(entry[1], dict)


def _head(entry: Any) -> Any:
    """``[name, keys]`` under the one name; anything else is for a rule to refuse."""
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [ALIASES["heads"].get(entry[0], entry[0]), *entry[1:]]
    if isinstance(entry, list) and entry and all(map(_is_head, entry)):  # VISSL's nested form
        heads = [_head(inner) for inner in entry]
        return _chain(heads) if len(heads) > 1 else heads[0]
    return entry


def without_vissl_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration without VISSL's unused keys that are at their defaults: what a person wants to read."""
    unused: dict[str, Any] = {}
    for key in vissl_keys():
        *parents, last = key.path.split(".")
        node = unused
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = key.allowed
    return _pruned(tree, unused)


def _pruned(tree: Mapping[str, Any], unused: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        below = unused.get(name)
        if isinstance(below, tuple) and value == below[0]:
            continue
        if isinstance(below, dict) and isinstance(value, Mapping):
            value = _pruned(value, below)
            if not value:
                continue
        kept[name] = value
    return kept
