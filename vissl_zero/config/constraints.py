"""Constraints of values, declared at the field, and the function that checks them.

    temperature: float = number(0.1, above=0)
    DEVICE: str = choice("auto", "cpu", "gpu", default="auto")

For all fields, every number must be finite and fit into 64 bits, and the elements of a typed list must have its type.

At the end: checks of single values, for rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from vissl_zero.errors import Problem, did_you_mean

_KEY = "constraint"
_LARGEST = 2**63 - 1
_ELEMENTS: dict[str, tuple[Any, str]] = {
    "int": (int, "whole numbers"),
    "float": ((int, float), "numbers"),
    "str": (str, "texts"),
}


@dataclass(frozen=True)
class Range:
    """A range of numbers; ``also`` has further allowed values with a special meaning, such as -1 for "all"."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    fix: str = ""

    def allows(self, value: float) -> bool:
        """Check whether a number (never NaN) is in the range."""
        return value in self.also or not (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )

    def violated(self, value: float) -> str:
        """Describe the bound that a number violates; for a range from 0 to 1, both bounds."""
        if (self.least, self.most) == (0, 1):
            return str(self)
        is_low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        side = replace(self, most=None, below=None) if is_low else replace(self, least=None, above=None, also=())
        return str(side)

    def __str__(self) -> str:
        low = f"at least {_plain(self.least)}" if self.least is not None else ""
        low = f"above {_plain(self.above)}" if self.above is not None else low
        high = f"at most {_plain(self.most)}" if self.most is not None else ""
        high = f"below {_plain(self.below)}" if self.below is not None else high
        words = " and ".join(filter(None, (low, high)))
        if self.least is not None and self.most is not None:
            words = f"from {_plain(self.least)} to {_plain(self.most)}"
        return " or ".join([*(_plain(value) for value in self.also), words])


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    options: tuple[Any, ...]
    also: tuple[Any, ...] = ()  # accepted, but not listed in messages

    @property
    def words(self) -> list[str]:
        """The options as text; '' for the empty one."""
        return ["''" if option == "" else str(option) for option in self.options]

    def __str__(self) -> str:
        return " or ".join(self.words)


def number(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] = (),
    fix: str = "",
) -> Any:
    """Declare a dataclass field whose number, or each number of its list, is in a range.

    Args:
        default: default value; a list is copied for each instance.
        least, most, above, below: bounds, the last two exclusive.
        also: further allowed values outside of the bounds.
        fix: hint for the message; by default it suggests an allowed value.
    """
    return _field(default, Range(least, most, above, below, also, fix))


def choice(*options: Any, default: Any, also: tuple[Any, ...] = ()) -> Any:
    """Declare a field whose value, or each value of its list, is one of ``options`` (or of ``also``, not listed)."""
    return _field(default, Choice(options, also))


def _field(default: Any, constraint: Range | Choice) -> Any:
    metadata = {_KEY: constraint}
    # dataclasses refuse a default that all instances would share.
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def constraint_problems(value: Any, key: str, unused: Collection[str] = ()) -> Iterator[Problem]:  # noqa: C901
    """Yield a problem for each value in a tree of dataclasses and plain containers that its field does not allow.

    Args:
        value: a dataclass, or a value in one.
        key: full key path of ``value``, such as ``config.MODEL``.
        unused: paths of blocks that this run does not read; they are not checked.
    """
    if key in unused:
        return
    # ``is_dataclass`` holds for classes too.
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            inner, path = getattr(value, item.name), f"{key}.{item.name}"
            # A value of a wrong type would otherwise be reported again, as out of range.
            problems = [*_of_type(inner, str(item.type), path)] or [*constraint_problems(inner, path, unused)]
            yield from problems
            if _KEY in item.metadata and not problems and path not in unused:
                yield from _outside(inner, item.metadata[_KEY], path)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from constraint_problems(inner, f"{key}.{name}", unused)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from constraint_problems(inner, f"{key}[{index}]", unused)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, str(value), "must be a finite number", f"Correct {key}.")
    # OmegaConf takes whole numbers of any size, and torch and numpy do not.
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield Problem(key, _short(value), f"must be at most {_LARGEST}", f"Lower {key}.")


def _of_type(value: Any, annotation: str, key: str) -> Iterator[Problem]:
    """Yield the problem of a typed list with an element of another type."""
    # OmegaConf accepts containers among the numbers of a typed list.
    list_type = re.fullmatch(r"list\[(int|float|str)\](?: \| None)?", annotation)
    if not list_type or not isinstance(value, (list, tuple)):
        return
    kind, words = _ELEMENTS[list_type[1]]
    # A bool is an int to Python.
    wrong = [item for item in value if not isinstance(item, kind) or isinstance(item, bool)]
    if wrong:
        yield Problem(key, _short(wrong[0]), f"must be a list of {words}", f"Correct {key}.")


def _outside(value: Any, constraint: Range | Choice, key: str) -> Iterator[Problem]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _outside(item, constraint, f"{key}[{index}]")
    elif isinstance(constraint, Range):
        if isinstance(value, (int, float)) and not constraint.allows(value):
            must = constraint.violated(value)
            nearest = next(iter(constraint.also), constraint.least)
            write = f"Write {key}={_plain(nearest)}." if nearest is not None else f"Correct {key}."
            yield Problem(key, _short(value), f"must be {must}", constraint.fix or write)
    elif value is not None and value not in constraint.options and value not in constraint.also:
        fix = did_you_mean(str(value), map(str, constraint.options)).strip() or "Choose one of them."
        yield Problem(key, repr(value), f"must be {constraint}", fix)


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:20]}... ({len(text)} digits)"


def at_least(key: str, value: float | None, least: float, fix: str = "") -> list[Problem]:
    """Check that ``value``, if given, is at least ``least``."""
    if value is None or value >= least:
        return []
    return [Problem(f"config.{key}", str(value), f"must be at least {least}", fix or f"Write config.{key}={least}.")]


def above_zero(key: str, value: float | None) -> list[Problem]:
    """Check that ``value``, if given, is positive."""
    if value is None or value > 0:
        return []
    return [Problem(f"config.{key}", str(value), "must be above 0", f"Correct config.{key}.")]


def one_of(key: str, value: str, allowed: Iterable[str]) -> list[Problem]:
    """Check that ``value`` is among ``allowed``."""
    names = list(allowed)
    if value in names:
        return []
    fix = did_you_mean(value, names).strip() or f"Choose one of: {', '.join(names)}."
    return [Problem(f"config.{key}", repr(value), f"must be {' or '.join(names)}", fix)]


def pattern_problems(key: str, value: str) -> list[Problem]:
    """Check that ``value`` is a non-empty regular expression; ``key`` is the full key path."""
    fix = "Separate names, or parts of names, by '|': 'qkv|fc1' matches layers whose name contains qkv or fc1."
    try:
        re.compile(value)
    except re.error as error:
        return [Problem(key, repr(value), f"must be a regular expression ({error})", fix)]
    return [] if value else [Problem(key, "''", "must be a regular expression that is not empty", fix)]
