"""The generators that a checkpoint keeps: torch's, numpy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vissl_zero.checkpoint.snapshot import random_state, restore_random_state
from vissl_zero.errors import CheckpointError

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch_normal": lambda: torch.randn(3).tolist(),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy_normal": lambda: np.random.normal(),  # of two that are drawn at once, one is kept
    "python": lambda: [random.random() for _ in range(3)],
    "python_normal": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_generator_goes_on_where_it_was(draw: Callable[[], object]) -> None:
    draw()
    state = json.loads(json.dumps(random_state(CPU)))
    wanted = [draw(), draw()]
    assert wanted[0] != wanted[1]
    restore_random_state(state, CPU)
    assert [draw(), draw()] == wanted


@pytest.mark.parametrize("key", ["torch", "numpy", "python"])
@pytest.mark.parametrize("value", [None, "00", [1, 2]])
def test_what_is_no_state_is_one_sentence(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="generators cannot be restored"):
        restore_random_state(random_state(CPU) | {key: value}, CPU)
