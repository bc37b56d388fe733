"""``LOSS``: a name and, under that name, the loss's keys. A plain dict, so that a loss of your own needs no leave."""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any

from vissl_zero.config.components import builtin_keys
from vissl_zero.config.vissl import with_vissl_keys

DEFAULT = "CrossEntropyLoss"


def default_loss() -> dict[str, Any]:
    """The built-in losses with their defaults; typed nodes, so a wrong key or type is refused where it stands."""
    blocks = {name: _block(schema, f"LOSS.{name}")() for name, schema in builtin_keys("loss").items()}
    return {"name": DEFAULT, **blocks}


@cache
def _block(schema: type, path: str) -> type:
    """A dataclass of keys, and those inside it, with VISSL's other keys of the same blocks."""
    extra: list[tuple[str, type, Any]] = []
    for item in fields(schema):
        if isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            inner = _block(item.default_factory, f"{path}.{item.name}")
            extra.append((item.name, inner, field(default_factory=inner)))
    block = make_dataclass(schema.__name__, extra, bases=(schema,))
    block.__module__, block.__doc__ = schema.__module__, schema.__doc__
    return with_vissl_keys(path)(block)
