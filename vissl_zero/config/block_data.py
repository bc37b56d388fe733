"""Convert between typed blocks and plain data, such as a saved run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def block_of(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return a block with the values of ``data``; keys that are absent keep their defaults.

    Args:
        kind: dataclass of keys, such as ``RunConfig`` or ``Data``.
        data: plain nested containers; inner blocks are converted too.
    Raises:
        ValueError: a key is unknown, or a value is not a block where one is expected.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is no block of {kind.__name__}")
    block = kind()
    known = {item.name for item in fields(block)}  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{name} is no key of {kind.__name__}")
        default = getattr(block, name)
        is_block = is_dataclass(default) and not isinstance(value, type(default))
        setattr(block, name, block_of(type(default), value) if is_block else value)
    return block


def declared_keys(data: Mapping[str, Any], kind: type | None) -> dict[str, Any]:
    """Return the keys of ``data`` that a component's dataclass declares: blocks also carry unused keys of VISSL."""
    assert kind is not None
    kept: dict[str, Any] = {}
    for item in fields(kind):
        if item.name not in data:
            continue
        value = data[item.name]
        default = item.default_factory() if callable(item.default_factory) else None
        is_block = is_dataclass(default) and isinstance(value, Mapping)
        kept[item.name] = declared_keys(value, type(default)) if is_block else value
    return kept
