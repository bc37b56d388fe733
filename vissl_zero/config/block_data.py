"""Build typed blocks from plain data, such as a saved run's configuration."""

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
