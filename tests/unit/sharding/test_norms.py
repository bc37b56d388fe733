"""Norms over local shards, without ranks."""

from __future__ import annotations

import pytest
import torch

from vissl_zero.sharding.state.shard import squared_norms
from vissl_zero.sharding.update.stepper import dots


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]
)
def test_norms_and_dots_of_each_tensor_in_a_wide_type(dtype: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    lefts = [torch.randn(shape).to(dtype) for shape in ((3, 4), (0, 5), (7,), ())]
    rights = [torch.randn(shape).to(dtype) for shape in ((3, 4), (0, 5), (7,), ())]
    norms = squared_norms(lefts)
    products = dots(lefts, rights)
    assert norms.dtype == products.dtype == wide
    tolerance = 1e-2 if dtype == torch.float16 else 1e-6
    for index, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        assert norms[index].item() == pytest.approx(left.double().square().sum().item(), rel=tolerance)
        expected = (left.double() * right.double()).sum().item()
        assert products[index].item() == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_large_half_precision_values_do_not_overflow() -> None:
    assert squared_norms([torch.full((4,), 3e4, dtype=torch.float16)]).item() == pytest.approx(3.6e9, rel=1e-2)


def test_no_tensors_give_no_norms() -> None:
    assert squared_norms([]).shape == dots([], []).shape == (0,)
