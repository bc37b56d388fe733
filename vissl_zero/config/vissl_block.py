"""Join the keys that VISSL has and we do not use to the dataclasses of those we do.

A typed dataclass per block says what we use. The rest of VISSL's tree comes from two tables (``vissl_no_effect`` and
``vissl_refused``), so that a recipe written for VISSL composes whole while a mistyped key is still refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, TypeVar

from vissl_zero.config.vissl_no_effect import NO_EFFECT
from vissl_zero.config.vissl_refused import REFUSED, OneOf

T = TypeVar("T")


@dataclass(frozen=True)
class VisslKey:
    """One key of the tables.

    Attributes:
        path: under ``config:``, such as ``DATA.TRAIN.STRATIFIED_SAMPLER.ENABLED``.
        allowed: values that change nothing here; the first is the default.
        is_refused: any other value is refused, because it would change the result; else it has no effect.
    """

    path: str
    allowed: tuple[Any, ...]
    is_refused: bool


def vissl_keys() -> Iterator[VisslKey]:
    """Every key of both tables."""
    for table, is_refused in ((REFUSED, True), (NO_EFFECT, False)):
        for path, value in _leaves(table, ""):
            allowed = value.values if isinstance(value, OneOf) else (value,)
            yield VisslKey(path, allowed, is_refused)


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


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
    block.__module__ = __name__
    setattr(sys.modules[__name__], block.__name__, block)
    return block
