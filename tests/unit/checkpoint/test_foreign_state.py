"""Parameters that other libraries lay end to end, cut into parts of ranks."""

from __future__ import annotations

import pytest
import torch

from vissl_zero.checkpoint.foreign_state import _gather


@pytest.mark.parametrize(
    ("first", "shape", "values"),
    [
        (0, (2,), [0, 1]),
        (1, (2, 2), [[1, 2], [3, 4]]),  # over a border
        (3, (2,), [3, 4]),  # exactly the second part
        (2, (4,), [2, 3, 4, 5]),  # over two borders
        (5, (1, 1), [[5]]),
        (4, (), 4),
        (6, (0, 3), []),
    ],
)
def test_elements_are_taken_over_the_borders_of_parts(first: int, shape: tuple[int, ...], values: object) -> None:
    parts = [torch.arange(6, dtype=torch.bfloat16)[start:stop] for start, stop in ((0, 3), (3, 5), (5, 5), (5, 6))]
    taken = _gather(parts, first, torch.Size(shape).numel(), shape)
    assert (taken.shape, taken.dtype, taken.tolist()) == (shape, torch.bfloat16, values)
