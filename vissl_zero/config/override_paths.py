"""Report overrides whose key path continues below a list or a plain value, where there are no names.

Hydra has no message for them: it raises Python's own errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.errors import Problem, counted

_KEY = re.compile(r"(\+{0,2}|~)((?!hydra\b)[\w.]+\.[\w.]+)(?:=(.*))?")
_MOST_PLACES = 3


def blocked(tree: DictConfig, words: Sequence[str]) -> dict[str, Problem]:
    """Map each override whose key names an item of a list, or continues below a plain value, to its problem.

    Args:
        tree: tree composed from the recipe's files alone; valid overrides are applied to it, in order.
        words: words of the command line in Hydra's form (``a.1.b=2``).
    """
    problems = {}
    for word in words:
        if not (parsed := _KEY.fullmatch(word)):
            continue
        path = parsed[2].split(".")
        if problem := _problem(tree, path, parsed[1]):
            problems[word] = problem
        # Applied, because a later word may name what this one adds.
        elif parsed[1] != "~":
            _apply(tree, parsed[2], word)
    return problems


def _apply(tree: DictConfig, key: str, word: str) -> None:
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        with suppress(OmegaConfBaseException):  # a value of the wrong type is reported elsewhere
            OmegaConf.update(tree, key, override.value(), force_add=True)


def _problem(tree: DictConfig, path: Sequence[str], sign: str) -> Problem | None:
    node: Any = tree
    for depth, part in enumerate(path):
        above, rest, is_last = _written(path[:depth]), path[depth:], depth == len(path) - 1
        if isinstance(node, ListConfig) and not node._is_none():
            if part.isdecimal() and int(part) < len(node) and not (is_last and sign in ("~", "+")):
                node = node._get_node(int(part))
                continue
            return _in_list(node, above, rest, _written(path))
        if not isinstance(node, DictConfig):
            value = node._value() if node is not None else None
            # What an interpolation stands for may have keys.
            if value is None or (isinstance(value, str) and "${" in value):
                return None
            must = f"is not a key: {above} is one value, which has no keys"
            return Problem(_written(path), "", must, f"Write {above}=<value>.")
        if node._is_none() or node._is_interpolation() or part not in node:
            return None
        node = node._get_node(part)
    return None


def _in_list(node: ListConfig, above: str, rest: Sequence[str], key: str) -> Problem:
    """Return the problem of a key path that cannot be reached, added or removed in a list, with similar paths."""
    size, whole = counted(len(node), "item"), f"{above}=[...]"
    if rest[0].isdecimal():
        must = f"is not a key: {above} has {size}, counted from 0, and none can be added or taken out"
        return Problem(key, "", must, f"Write the whole list, {whole}.")
    must = f"is not a key: {above} is a list ({size}), and what is in it has a position and no name"
    plain = OmegaConf.to_container(node, resolve=False)
    places = [f"{above}{place}" for place in _places(plain, rest)][:_MOST_PLACES]
    fix = (
        f"Write {' or '.join(f'{place}=<value>' for place in places)}." if places else f"Write the whole list, {whole}."
    )
    return Problem(key, "", must, fix)


def _places(node: Any, wanted: Sequence[str]) -> list[str]:
    """Find the keys below ``node`` that have the last of the wanted names, those in items of the other names first."""
    candidates = [(names, place) for names, place in _leaves(node, "", frozenset()) if place.endswith(f".{wanted[-1]}")]
    others = {*wanted[:-1]}
    best = max((len(others & names) for names, _ in candidates), default=0)
    return [place for names, place in candidates if len(others & names) == best]


def _leaves(node: Any, place: str, names: frozenset[str]) -> Iterator[tuple[frozenset[str], str]]:
    """Yield each key below a node with the texts that stand beside it: ``["mlp", {dims: ...}]``, ``{name: ...}``."""
    if isinstance(node, dict):
        items = [(f"{place}.{key}", value) for key, value in node.items()]
    else:
        items = [(f"{place}[{index}]", value) for index, value in enumerate(node if isinstance(node, list) else ())]
    beside = names | {value for _, value in items if isinstance(value, str)}
    for here, value in items:
        yield beside, here
        yield from _leaves(value, here, beside)


def _written(path: Sequence[str]) -> str:
    """Write a path as messages do: ``a[1].b``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(path))
