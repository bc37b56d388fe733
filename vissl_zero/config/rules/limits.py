"""Ranges and choices of single keys, as one line each."""

from __future__ import annotations

from collections.abc import Iterable

from vissl_zero.errors import Problem, did_you_mean


def at_least(key: str, value: float | None, least: float, fix: str = "") -> list[Problem]:
    """A problem if ``value`` is given and less than ``least``."""
    if value is None or value >= least:
        return []
    return [Problem(f"config.{key}", str(value), f"must be at least {least}", fix or f"Write config.{key}={least}.")]


def at_most(key: str, value: float, most: float) -> list[Problem]:
    """A problem if ``value`` is more than ``most``."""
    if value <= most:
        return []
    return [Problem(f"config.{key}", str(value), f"must be at most {most}", f"Lower config.{key}.")]


def above_zero(key: str, value: float | None) -> list[Problem]:
    """A problem if ``value`` is given and not positive."""
    if value is None or value > 0:
        return []
    return [Problem(f"config.{key}", str(value), "must be above 0", f"Correct config.{key}.")]


def one_of(key: str, value: str, allowed: Iterable[str]) -> list[Problem]:
    """A problem if ``value`` is not among ``allowed``."""
    names = list(allowed)
    if value in names:
        return []
    fix = did_you_mean(value, names).strip() or f"Choose one of: {', '.join(names)}."
    return [Problem(f"config.{key}", repr(value), f"must be {' or '.join(names)}", fix)]
