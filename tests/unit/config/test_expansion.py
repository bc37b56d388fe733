"""Texts that name each other are bounded before they are resolved, however they name each other."""

from __future__ import annotations

import pytest

from vissl_zero.config.expansion import MOST_CHARACTERS, _size, require_moderate_texts
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


@pytest.mark.parametrize(
    ("texts", "size"),
    [
        ({"a": "xy"}, 2),
        ({"a": "${b}"}, 4),  # of a number, or of what is not there
        ({"a": "${b}", "b": "xyz"}, 4 + 3),
        ({"a": "${b}${b}", "b": "${c}", "c": "x"}, 8 + 2 * (4 + 1)),
        ({"a": "${a}"}, 4),
        ({"a": "${b.0}${b[0]}", "b.0": "xyz"}, 13 + 2 * 3),
    ],
)
def test_the_size_of_a_text_counts_what_it_refers_to(texts: dict[str, str], size: int) -> None:
    assert _size("a", texts, {}) == size


def test_a_reference_with_dots_begins_above_its_own_key() -> None:
    texts = {"a.b.c": "${.d}${..e}", "a.b.d": "x" * 10, "a.e": "y" * 100, "d": "z"}
    assert _size("a.b.c", texts, {}) == 11 + 10 + 100
