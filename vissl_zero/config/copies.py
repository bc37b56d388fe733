"""Copies of trees that cost much to build: pickle copies one of OmegaConf's in a fifth of the time of its deepcopy."""

from __future__ import annotations

import io
import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_CLASSES: list[type] = []


def _class(place: int) -> type:
    return _CLASSES[place]


class _Pickler(pickle.Pickler):
    """Pickles for this process alone: a class as its place in a list, since many are made here and have no address."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type):
            return NotImplemented
        if value not in _CLASSES:
            _CLASSES.append(value)
        return _class, (_CLASSES.index(value),)


class Copies(Generic[T]):
    """Makes copies of an object as it was when this was built; they share its classes, and nothing else."""

    def __init__(self, original: T):
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(original)
        self._pickle = file.getvalue()

    def new(self) -> T:
        """Make a copy."""
        copy: T = pickle.loads(self._pickle)  # noqa: S301 - written above
        return copy
