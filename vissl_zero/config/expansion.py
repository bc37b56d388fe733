"""How long the texts of a tree become once their ``${...}`` are resolved, found without resolving them.

Eleven keys that each name the one before nine times would fill any memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vissl_zero.errors import ConfigError, Problem

MOST_CHARACTERS = 1_000_000
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*(\.*)([\w.\[\]]+)")


def require_moderate_texts(tree: Mapping[str, object]) -> None:
    """Refuse texts that would be longer than ``MOST_CHARACTERS`` together.

    Args:
        tree: plain containers, interpolations as written; keys are named from its root.
    Raises:
        ConfigError: names the first such text. References that end nowhere, or in themselves, are left to OmegaConf.
    """
    texts = dict(_texts(tree, ""))
    sizes: dict[str, int] = {}
    total = 0
    for path in texts:
        total += _size(path, texts, sizes)
        if total > MOST_CHARACTERS:
            must = f"must not make the texts longer than {MOST_CHARACTERS:,} characters, with ${{...}} resolved"
            raise ConfigError([Problem(path, "", must, "Name fewer keys in ${...}.")])


def _texts(tree: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield key path and text of every text in a tree; list positions are numbers in the path."""
    if isinstance(tree, str):
        yield path, tree
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _texts(value, f"{path}.{key}" if path else str(key))


def _size(path: str, texts: Mapping[str, str], sizes: dict[str, int]) -> int:
    """Count the characters of one text, resolved; ``sizes`` keeps those that are known."""
    if path not in texts:
        return 0
    if path not in sizes:
        sizes[path] = 0  # of one that leads back here
        text, parents = texts[path], path.split(".")
        size = len(text)
        for dots, name in _REFERENCE.findall(text):
            base = parents[: len(parents) - len(dots)] if dots else []
            key = re.sub(r"\[(\w+)\]", r".\1", name)
            size = min(size + _size(".".join([*base, key]), texts, sizes), 2 * MOST_CHARACTERS)
        sizes[path] = size
    return sizes[path]
