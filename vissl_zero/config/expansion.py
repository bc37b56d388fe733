"""Bound the length of a tree's strings after resolving ``${...}``, without resolving them.

Eleven keys that each name the one before nine times would fill any memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vissl_zero.errors import ConfigError, Problem

# Each key may name the one before twice: thirty keys would make a text of a gigabyte.
MOST_CHARACTERS = 1_000_000
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*(\.*)([\w.\[\]]+)")


def require_moderate_texts(tree: Mapping[str, object]) -> None:
    """Check that all strings together have at most ``MOST_CHARACTERS`` characters with ``${...}`` resolved.

    Args:
        tree: plain containers with interpolations as written, from the root of key paths.
    Raises:
        ConfigError: the strings are too long; names the string that exceeds the limit.
    """
    # Missing and cyclic references count as empty: OmegaConf reports them.
    texts = dict(_texts(tree, ""))
    sizes: dict[str, int] = {}
    total = 0
    for path in texts:
        total += _size(path, texts, sizes)
        if total > MOST_CHARACTERS:
            must = f"must not make the texts longer than {MOST_CHARACTERS:,} characters, with ${{...}} resolved"
            raise ConfigError([Problem(path, "", must, "Name fewer keys in ${...}.")])


def _texts(tree: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield (key path, string) of every string in a tree; list positions are numbers in the path."""
    if isinstance(tree, str):
        yield path, tree
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _texts(value, f"{path}.{key}" if path else str(key))


def _size(path: str, texts: Mapping[str, str], sizes: dict[str, int]) -> int:
    """Return the number of characters of one resolved string; ``sizes`` caches results."""
    if path not in texts:
        return 0
    if path not in sizes:
        sizes[path] = 0  # ends cycles: a reference back to this string counts as empty
        text, parents = texts[path], path.split(".")
        size = len(text)
        for dots, name in _REFERENCE.findall(text):
            base = parents[: len(parents) - len(dots)] if dots else []
            key = re.sub(r"\[(\w+)\]", r".\1", name)
            # Capped, because the true size may double with each key.
            size = min(size + _size(".".join([*base, key]), texts, sizes), 2 * MOST_CHARACTERS)
        sizes[path] = size
    return sizes[path]
