"""Convert values to Hydra's override grammar, and split overrides. Imports no Hydra."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_RESERVED = {"true", "false", "null", "nan", "inf"}


def as_word(value: Any) -> str:
    """Return a number, string, None, list or dict in Hydra's grammar, as the part of an override after ``=``."""
    if value is None:
        return "null"
    # Before numbers, because a bool is an int to Python.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_word, value)) + "]"
    text = str(value)
    # Without quotes, the text "true" would become a truth value.
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    # In Hydra's quoted strings, backslashes count as escapes only before a quote or at the end.
    quoted = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", quoted) + "'"


def searchpath_override(folders: Sequence[str | Path]) -> list[str]:
    """Return the override that looks for recipes in ``folders``, as --config-dir does; empty without folders."""
    # Quote only if needed: this override also stands in commands that are printed for a shell.
    places = [f"file://{Path(folder).absolute()}" for folder in folders]
    words = [place if re.fullmatch(r"[\w/.:-]+", place, re.ASCII) else as_word(place) for place in places]
    return [f"hydra.searchpath=[{','.join(words)}]"] if folders else []


def pairs_of(words: Sequence[str]) -> dict[str, str]:
    """Return key -> value of overrides; the last of equal keys wins, as in Hydra."""
    return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}


def recipe_and_overrides(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split command-line words into (value of ``config=`` or None, the overrides)."""
    recipe = next((word.removeprefix("config=") for word in words if word.startswith("config=")), None)
    return recipe, [word for word in words if not word.startswith("config=")]
