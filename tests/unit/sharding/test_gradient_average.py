"""How gradients are packed for sending."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.sharding.engines.cpu_communicator import add_in_order
from vissl_zero.sharding.engines.gradient_average import _buckets

SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("params", "buckets"),
    [
        ([], []),
        ([(SINGLE, 10)], [[0]]),
        ([(SINGLE, 10), (SINGLE, 15)], [[1, 0]]),  # exactly full: 100 bytes
        ([(SINGLE, 10), (SINGLE, 16)], [[1], [0]]),
        ([(SINGLE, 99), (SINGLE, 1)], [[1], [0]]),  # larger than a bucket: alone
        ([(SINGLE, 20), (SINGLE, 20), (SINGLE, 5)], [[2, 1], [0]]),
        ([(SINGLE, 1), (HALF, 1), (HALF, 1), (SINGLE, 1)], [[3], [2, 1], [0]]),
    ],
)
def test_buckets_hold_the_last_parameters_first_up_to_their_size_in_one_dtype(
    params: list[tuple[torch.dtype, int]], buckets: list[list[int]]
) -> None:
    made = [nn.Parameter(torch.zeros(count, dtype=dtype)) for dtype, count in params]
    places = {id(param): at for at, param in enumerate(made)}
    assert [[places[id(param)] for param in bucket] for bucket in _buckets(made, 100)] == buckets


@pytest.mark.parametrize(("is_mean", "expected"), [(False, 258.0), (True, 86.0)])
def test_half_precision_is_summed_in_float32_and_rounded_once(is_mean: bool, expected: float) -> None:
    """In bfloat16 256 + 1 is 256, and 256 / 3 is 85.5."""
    out = torch.empty(1, dtype=torch.bfloat16)
    add_in_order([torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)], out, is_mean=is_mean)
    assert out.item() == expected
