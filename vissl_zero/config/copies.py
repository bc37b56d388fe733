"""Fast copies of OmegaConf trees by pickle, which takes a fifth of the time of their ``deepcopy``."""

from __future__ import annotations

import io
import pickle
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_CLASSES: list[type] = []


def _class(index: int) -> type:
    return _CLASSES[index]


class _Pickler(pickle.Pickler):
    """Pickles objects for this process alone, with classes as indices in a list."""

    # Many classes are created at run time, so that pickle could not import them by name.
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type):
            return NotImplemented
        if value not in _CLASSES:
            _CLASSES.append(value)
        return _class, (_CLASSES.index(value),)


class Copies(Generic[T]):
    """Makes copies of an object in its state at construction; the copies share only its classes."""

    def __init__(self, original: T):
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(original)
        self._pickle = file.getvalue()

    def new(self) -> T:
        """Return a new copy."""
        copy: T = pickle.loads(self._pickle)  # noqa: S301 - written above
        return copy
