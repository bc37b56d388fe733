"""VISSL's keys that are not used here, and the dataclass fields that accept them.

A typed dataclass per block says what is used. The rest of VISSL's tree comes from ``keys.yaml``, so that a recipe
written for VISSL composes and a mistyped key is still refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf

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
    text = (files("vissl_zero.vissl") / "keys.yaml").read_text(encoding="utf-8")
    # The C loader where PyYAML has it: every command reads this file at its start, and the loader in Python is slow.
    tables: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - our own file
    return tables


def _tree(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of the file into one tree of defaults."""
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
        return _OneOf(*value["one_of"])
    return {key: _default(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class _OneOf:
    """Values that are all fine; the first is the default."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)


_TABLES = _read()
REFUSED, NO_EFFECT = _tree(_TABLES["refused"]), _tree(_TABLES["no_effect"])
OTHER_LOSSES: frozenset[str] = frozenset(_TABLES["other_losses"])
ALIASES: dict[str, dict[str, Any]] = _TABLES["aliases"]
# Earlier place of a block, as a path under ``config:`` -> its place today.
MOVED: dict[str, str] = _TABLES["moved"]
# What is meant otherwise than in VISSL: key (with * for a part), values it holds for (absent: all), and a sentence.
DIFFERENCES: list[dict[str, Any]] = _TABLES["differs"]
# A part of an internal file's name -> where the same file is public.
PUBLIC_FILES: dict[str, str] = _TABLES["public_files"]
TASK_LEVELS: dict[str, int] = ALIASES["task_levels"]


@cache
def vissl_keys() -> tuple[VisslKey, ...]:
    """List every key of both tables."""
    keys = []
    for name in ("refused", "no_effect"):
        for start, entry in _paths(_TABLES[name]):
            for path, value in _leaves(_default(entry["default"]), start):
                allowed = value.values if isinstance(value, _OneOf) else (value,)
                keys.append(VisslKey(path, allowed, name == "refused", entry["why"]))
    return tuple(keys)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def with_vissl_keys(path: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class, above ``@dataclass``: add the tables' keys under ``path`` that it does not have itself.

    Args:
        path: path of the block under ``config:``; empty for the root.
    """

    def decorate(cls: type[T]) -> type[T]:
        return _extend(cls, path, [_below(REFUSED, path), _below(NO_EFFECT, path)])

    return decorate


def todays_key(key: str) -> str:
    """Return where a key of an earlier version of VISSL, such as ``config.TENSORBOARD_SETUP.LOG_PARAMS``, is today."""
    for earlier, today in MOVED.items():
        if f"{key}.".startswith(f"config.{earlier}."):
            return f"config.{today}{key.removeprefix(f'config.{earlier}')}"
    return key


def move_blocks(tree: DictConfig) -> None:
    """Move blocks of a recipe's file that are where earlier versions of VISSL had them, in place.

    What the file also says in today's place counts, as it does in VISSL.
    """
    for earlier, today in MOVED.items():
        *parents, last = f"config.{earlier}".split(".")
        above = _block_at(tree, parents)
        if above is not None and isinstance(block := above._get_node(last), DictConfig):
            del above[last]
            said = _block_at(tree, f"config.{today}".split("."))
            OmegaConf.update(tree, f"config.{today}", block if said is None else OmegaConf.merge(block, said))


def _block_at(tree: DictConfig, path: list[str]) -> DictConfig | None:
    node: Any = tree
    for part in path:
        node = node._get_node(part) if isinstance(node, DictConfig) and not node._is_none() else None
    return node if isinstance(node, DictConfig) and not node._is_none() else None


def _below(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split(".") if path else []:
        tree = tree.get(key, {})
    return tree


def _extend(cls: type[T], path: str, trees: list[Mapping[str, Any]]) -> type[T]:
    field_names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    names = [name for name in dict.fromkeys(name for tree in trees for name in tree) if name not in field_names]
    extra = [_field(name, f"{path}.{name}", [tree[name] for tree in trees if name in tree]) for name in names]
    extended = make_dataclass(cls.__name__, extra, bases=(cls,))
    # pickle looks a class up by module and name, and the decorated name is this class; the generated keys need no
    # docstring.
    extended.__module__, extended.__doc__ = cls.__module__, cls.__doc__
    return extended


def _field(name: str, path: str, values: list[Any]) -> tuple[str, Any, Any]:
    if isinstance(values[0], dict) and any(values):
        block: type = _extend(_empty_block(path), path, values)
        if not path.startswith("LOSS."):
            globals()[block.__name__] = block  # where pickle looks for it
        return name, block, field(default_factory=block)
    value = values[0].values[0] if isinstance(values[0], _OneOf) else values[0]
    if isinstance(value, dict):
        return name, dict[str, Any], field(default_factory=dict)
    # Any: a value that has no effect, or is compared with its default, needs no type.
    # A copy for each configuration: a list that one of them changes must not change in the others.
    return name, Any, field(default_factory=lambda: copy.deepcopy(value))


def _empty_block(path: str) -> type:
    no_fields: list[tuple[str, Any]] = []
    block = make_dataclass(path.replace(".", "_"), no_fields)
    # Found there once the tree is imported; keys of losses never are: jobs of a sweep get those pickled by value.
    block.__module__ = __name__
    return block


def without_vissl_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop VISSL's unused keys at their defaults from a plain configuration: a person wants to read the rest."""
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
        # The default alone: another allowed value, though it changes nothing, was written by somebody who may look for
        # it.
        if isinstance(below, tuple) and value == below[0]:
            continue
        if isinstance(below, dict) and isinstance(value, Mapping):
            value = _pruned(value, below)
            if not value:
                continue
        kept[name] = value
    return kept
