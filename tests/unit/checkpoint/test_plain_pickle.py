"""Pickles that hold data alone are read; what is damaged, endless or runs something is refused before it is built."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from vissl_zero.checkpoint.torch_file import read_pickle
from vissl_zero.errors import CheckpointError

VALUES: dict[str, Any] = {
    "numbers": [0, -1, 2**40, 1.5, True, None],
    "texts": ("a", "\u00e4", ""),
    "nested": {"a": {1: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4, 5))]}, (1, "b"): []},
    "shared": [[1]] * 3,
}


@pytest.mark.parametrize("protocol", range(4))
@pytest.mark.parametrize("name", VALUES)
def test_containers_numbers_and_texts_are_read(name: str, protocol: int, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(VALUES[name], protocol))
    assert read_pickle(tmp_path / "a.pkl") == VALUES[name]


def _doubled(times: int, width: int = 2) -> object:
    """A tuple of 2^(times + 1) - 1 elements, those of the tuples in it included, in some hundred bytes."""
    value: object = ()
    for _ in range(times):
        value = (value,) * width
    return value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(_doubled(20), 2), "its tuples are nested without end"),
        (pickle.dumps([_doubled(20)], 0), "its tuples are nested without end"),
        (pickle.dumps(_doubled(10, width=4), 2), "its tuples are nested without end"),
        (b"t.", "its pickle pops an empty stack"),
        (b"a.", "its pickle pops an empty stack"),
        (b"Na.", "its pickle pops an empty stack"),
        (b"NNu.", "its pickle pops an empty stack"),
        (b"g1\n.", ""),
        (b"cos\nsystem\n(S'true'\ntR.", "it holds more than data"),
        (b"(S'true'\nios\nsystem\n.", ""),
        (b"", ""),
    ],
)
def test_what_is_damaged_endless_or_runs_something_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match="is refused: it is no plain pickle") as caught:
        read_pickle(tmp_path / "a.pkl")
    assert reason in str(caught.value)


def test_the_most_elements_of_a_tuple_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(_doubled(19), 2))
    assert len(read_pickle(tmp_path / "a.pkl")) == 2
