"""Walking plain nested dicts and lists by key path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vissl_zero.config.vissl_block import vissl_keys


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key path and value of everything that is neither a dict nor a list; list positions are numbers in the path."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def find(tree: Any, path: str) -> tuple[Any, Any] | None:
    """The dict or list that holds ``path`` and the key in it, or None if it is not there."""
    *parents, last = path.split(".")
    for part in parents:
        place = _place(tree, part)
        if place is None:
            return None
        tree = tree[place]
    place = _place(tree, last)
    return None if place is None else (tree, place)


def _place(tree: Any, part: str) -> Any:
    if isinstance(tree, Mapping):
        return part if part in tree else None
    return int(part) if isinstance(tree, list) and part.isdigit() and int(part) < len(tree) else None


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
