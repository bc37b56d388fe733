"""Walking plain nested dicts and lists by key path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
    """The dict or list that holds ``path`` and the key in it, or None if there is none."""
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
