"""Texts that name each other are bounded before they are resolved, however they name each other."""

from __future__ import annotations

import pytest

from vissl_zero.config.expansion import MOST_CHARACTERS, require_moderate_texts
from vissl_zero.errors import ConfigError

DOUBLINGS = 40  # 2^40 characters


@pytest.mark.parametrize("name", ["${{a.t{}}}", "${{.t{}}}", "${{..a.t{}}}", "${{...b.a.t{}}}"])
def test_texts_that_double_are_refused(name: str) -> None:
    """By the name from the root, of a neighbor, and of one further up."""
    texts = {"t0": "x" * 100} | {f"t{n + 1}": name.format(n) * 2 for n in range(DOUBLINGS)}
    tree = {"a": texts} if "..." not in name else {"b": {"a": texts}}
    with pytest.raises(ConfigError, match="must not make the texts longer than"):
        require_moderate_texts(tree)


def test_a_place_in_a_list_is_followed() -> None:
    tree = {"t": ["x" * 100, *(f"${{t[{n}]}}" * 2 for n in range(DOUBLINGS))]}
    with pytest.raises(ConfigError, match="must not make the texts longer than"):
        require_moderate_texts(tree)


def test_the_limit_itself_is_allowed() -> None:
    require_moderate_texts({"a": "x" * (MOST_CHARACTERS - 1), "b": "x"})
    with pytest.raises(ConfigError, match="must not make the texts longer than"):
        require_moderate_texts({"a": "x" * MOST_CHARACTERS, "b": "x"})


def test_texts_that_lead_in_a_circle_are_left_to_omegaconf() -> None:
    require_moderate_texts({"a": "${b}", "b": "${a}", "c": "${.c}", "d": "${gone}"})
