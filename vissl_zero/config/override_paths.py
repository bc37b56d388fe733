"""Overrides whose key goes on behind a list or a plain value, where there are no names.

Hydra has no sentence for them: it lets Python's own errors through.
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
    """Find the overrides that go through a list by a name, or through a plain value; each with its problem.

    Args:
        tree: composed of the recipe and the files alone; the words that can be are applied to it, in order.
        words: words of the command line, as Hydra takes them (``a.1.b=2``).
    """
    problems = {}
    for word in words:
        if not (parsed := _KEY.fullmatch(word)):
            continue
        path = parsed[2].split(".")
        if problem := _problem(tree, path, parsed[1]):
            problems[word] = problem
        elif parsed[1] != "~":
            _apply(tree, parsed[2], word)
    return problems


def _apply(tree: DictConfig, key: str, word: str) -> None:
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        with suppress(OmegaConfBaseException):  # a value of the wrong type has a problem of its own
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
            if value is None or (isinstance(value, str) and "${" in value):
                return None
            must = f"is not a key: {above} is one value, which has no keys"
            return Problem(_written(path), "", must, f"Write {above}=<value>.")
        if node._is_none() or node._is_interpolation() or part not in node:
            return None
        node = node._get_node(part)
    return None


def _in_list(node: ListConfig, above: str, rest: Sequence[str], key: str) -> Problem:
    """Make the problem of what cannot be reached, added or taken out in a list: name places where the rest fits."""
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
