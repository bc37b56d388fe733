"""Sinkhorn's algorithm in the logarithm is Sinkhorn's algorithm, and survives small epsilons."""

from __future__ import annotations

import pytest
import torch

from tests.unit.methods.slow_swav import slow_sinkhorn
from vissl_zero.methods.gather import sinkhorn


def _scores(num_problems: int = 2, n: int = 5, k: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(num_problems, n, k, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("num_iters", [0, 1, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_equals_the_algorithm_in_plain_numbers(num_iters: int, epsilon: float) -> None:
    scores = _scores()
    expected = torch.tensor([slow_sinkhorn(s.tolist(), epsilon, num_iters) for s in scores], dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(scores, epsilon, num_iters), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_epsilon_neither_overflows_nor_loses_a_prototype(dtype: torch.dtype) -> None:
    scores = _scores(1, 12, 4, dtype)
    scores[:, :, 3] = -1.0  # exp(-1 / 0.001) is 0 in any format
    with pytest.raises(ZeroDivisionError):  # without the logarithm, even with the largest score at 0
        slow_sinkhorn((scores[0] - scores.max()).tolist(), 0.001, 20)
    assigned = sinkhorn(scores, 0.001, 20)
    assert assigned.dtype == dtype and assigned.isfinite().all()
    torch.testing.assert_close(assigned.sum(dim=2), torch.ones(1, 12, dtype=dtype))
    assert (assigned.sum(dim=1) > 0.5).all()


def test_problems_do_not_mix() -> None:
    scores = _scores(3)
    together = sinkhorn(scores, 0.1, 3)
    for index in range(3):
        assert torch.equal(together[index], sinkhorn(scores[index : index + 1], 0.1, 3)[0])


def test_prototypes_share_by_a_power_law():
    scores = torch.randn(1, 4096, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = sinkhorn(scores, 0.5, 50, powerlaw=0.25).mean(dim=1)[0]
    wanted = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) ** -0.25
    torch.testing.assert_close(shares, wanted / wanted.sum(), rtol=1e-9, atol=0)
