"""Ranges and choices at their ends, and what is said of a value that lies outside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from vissl_zero.config.constraints import (
    Range,
    above_zero,
    at_least,
    choice,
    constraint_problems,
    number,
    one_of,
    pattern_problems,
)
from vissl_zero.errors import Problem


@dataclass
class _Block:
    share: float = number(0.5, least=0, most=1)
    count: int | None = number(4, least=1, most=8, also=(-1,))
    rate: float | None = number(0.1, above=0, below=2.5, fix="Write 0.1.")
    base: float = number(2.0, above=1)
    word: str | None = choice("auto", "cpu", default="auto", also=("AUTO",))
    words: list[str] = choice("a", "b", default=["a"])
    sides: list[int] = number([3, 4], least=2)
    names: list[str] = field(default_factory=list)
    free: Any = None


CASES: list[tuple[dict[str, Any], str]] = [
    *(({"share": value}, "") for value in (0, 1, 0.0, 1.0)),
    ({"share": -1e-9}, "run.share: must be from 0 to 1 (got -1e-09). Write run.share=0."),
    ({"share": 1.5}, "run.share: must be from 0 to 1 (got 1.5). Write run.share=0."),
    *(({"count": value}, "") for value in (None, -1, 1, 8)),
    ({"count": 0}, "run.count: must be -1 or at least 1 (got 0). Write run.count=-1."),
    ({"count": 9}, "run.count: must be at most 8 (got 9). Write run.count=-1."),
    *(({"rate": value}, "") for value in (None, 1e-9, 2.4999)),
    ({"rate": 0.0}, "run.rate: must be above 0 (got 0.0). Write 0.1."),
    ({"rate": 2.5}, "run.rate: must be below 2.5 (got 2.5). Write 0.1."),
    ({"base": 1}, "run.base: must be above 1 (got 1). Correct run.base."),
    *(({"word": value}, "") for value in (None, "auto", "cpu", "AUTO")),
    ({"word": "cpus"}, "run.word: must be auto or cpu (got 'cpus'). Did you mean 'cpu'?"),
    ({"word": "xyzzy"}, "run.word: must be auto or cpu (got 'xyzzy'). Choose one of them."),
    ({"words": ["a", "b", "cc"]}, "run.words[2]: must be a or b (got 'cc')."),
    ({"sides": [2, 1]}, "run.sides[1]: must be at least 2 (got 1). Write run.sides[1]=2."),
    ({"sides": [3, True]}, "run.sides: must be a list of whole numbers (got True). Correct run.sides."),
    ({"sides": [3, 0.5]}, "run.sides: must be a list of whole numbers (got 0.5). Correct run.sides."),
    ({"names": [1]}, "run.names: must be a list of texts (got 1). Correct run.names."),
    ({"free": [{"x": math.nan}]}, "run.free[0].x: must be a finite number (got nan). Correct run.free[0].x."),
    ({"free": (0, -math.inf)}, "run.free[1]: must be a finite number (got -inf). Correct run.free[1]."),
    *(({"free": value}, "") for value in (2**63 - 1, 1 - 2**63, True, _Block)),
    ({"free": -(2**63)}, f"run.free: must be at most {2**63 - 1} (got -{2**63}). Lower run.free."),
    ({"free": 10**60}, f"run.free: must be at most {2**63 - 1} (got {10**19}... (61 digits)). Lower run.free."),
    ({"free": 10**59}, f"run.free: must be at most {2**63 - 1} (got {10**59}). Lower run.free."),
    ({"free": _Block(share=2.0)}, "run.free.share: must be from 0 to 1 (got 2.0). Write run.free.share=0."),
]


@pytest.mark.parametrize(("keys", "sentence"), CASES, ids=[f"{at}-{[*keys]}" for at, (keys, _) in enumerate(CASES)])
def test_a_value_outside_is_refused_by_its_key_and_bound(keys: Mapping[str, Any], sentence: str) -> None:
    texts = [str(problem) for problem in constraint_problems(_Block(**keys), "run")]
    assert len(texts) == bool(sentence) and all(text.startswith(sentence) for text in texts), texts


def test_a_block_that_the_run_does_not_read_may_hold_anything() -> None:
    wrong = _Block(share=2.0, free=_Block(share=3.0))
    assert [problem.key for problem in constraint_problems(wrong, "run")] == ["run.share", "run.free.share"]
    assert [problem.key for problem in constraint_problems(wrong, "run", ["run.free"])] == ["run.share"]
    assert [problem.key for problem in constraint_problems(wrong, "run", ["run.share"])] == ["run.free.share"]
    assert not list(constraint_problems(wrong, "run", ["run"]))


def test_a_default_that_is_a_list_is_one_for_each_block() -> None:
    _Block().sides.append(7)
    assert _Block().sides == [3, 4]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Range(least=1), "at least 1"),
        (Range(most=0.5), "at most 0.5"),
        (Range(above=0, most=3), "above 0 and at most 3"),
        (Range(least=0, below=1), "at least 0 and below 1"),
        (Range(least=2, most=2**31), "from 2 to 2147483648"),
        (Range(least=1, also=(-1, 0)), "-1 or 0 or at least 1"),
    ],
)
def test_a_range_is_written_in_words(limits: Range, text: str) -> None:
    assert str(limits) == text


@pytest.mark.parametrize(
    ("problems", "text"),
    [
        (at_least("A.B", None, 2), ""),
        (at_least("A.B", 2, 2), ""),
        (at_least("A.B", 1, 2), "config.A.B: must be at least 2 (got 1). Write config.A.B=2."),
        (at_least("A.B", 1, 2, "Raise it."), "config.A.B: must be at least 2 (got 1). Raise it."),
        (above_zero("A.B", None), ""),
        (above_zero("A.B", 1e-9), ""),
        (above_zero("A.B", 0), "config.A.B: must be above 0 (got 0). Correct config.A.B."),
        (above_zero("A.B", 1), ""),
        (pattern_problems("config.A.B", "qkv|fc[12]"), ""),
        (pattern_problems("config.A.B", ""), "config.A.B: must be a regular expression that is not empty (got '')."),
        (pattern_problems("config.A.B", "a("), "config.A.B: must be a regular expression (missing ), unterminated"),
        (one_of("A.B", "x", ("x", "y")), ""),
        (one_of("A.B", "zebra", ("x", "y")), "config.A.B: must be x or y (got 'zebra'). Choose one of: x, y."),
        (one_of("A.B", "adam", ("adamw", "sgd")), "config.A.B: must be adamw or sgd (got 'adam'). Did you mean"),
    ],
)
def test_a_rule_of_one_line(problems: list[Problem], text: str) -> None:
    assert len(problems) == bool(text) and all(str(problem).startswith(text) for problem in problems), problems
