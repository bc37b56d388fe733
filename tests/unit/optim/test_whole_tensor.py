"""Arithmetic of the optimizers that look at full tensors, against torch's and against their papers.

That they do the same at every level, tests/dist shows; a wrong factor would be the same at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.optim import whole_tensor
from vissl_zero.optim.whole_tensor import (
    AdamW8bit,
    MuonAdamW,
    NorMuonAdamW,
    Orthogonal,
    Shampoo,
    _inverse_fourth_root,
    _Quantized,
    _table,
)

Build = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _steps(build: Build, start: Tensor, num_steps: int = 1) -> list[Tensor]:
    """The parameter before the first step and after each, with other gradients in each."""
    param = nn.Parameter(start.clone())
    optimizer, found = build([param]), [start]
    for step in range(num_steps):
        param.grad = _randn(100 + step, *start.shape).as_strided(start.shape, start.stride())
        optimizer.step()
        found.append(param.detach().clone())
    return found


def _equal(found: list[Tensor], expected: list[Tensor], **close: float) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 1e-10, "atol": 1e-12} | close))


@pytest.mark.parametrize("start", [_randn(0, 7), _randn(0, 4, 5), _randn(0, 5, 4).T])
def test_small_tensors_take_adamws_steps(start: Tensor) -> None:
    _equal(_steps(lambda p: AdamW8bit(p, **ADAM), start, 4), _steps(lambda p: torch.optim.AdamW(p, **ADAM), start, 4))


def test_moments_of_eight_bits_stay_near_adamws() -> None:
    """https://arxiv.org/abs/2110.02861: the steps are AdamW's but for the rounding of the moments, a few percent."""
    start = _randn(0, 100, 30)
    eight = _steps(lambda p: AdamW8bit(p, block_size=64, min_elements=1, **ADAM), start, 5)
    whole = _steps(lambda p: torch.optim.AdamW(p, **ADAM), start, 5)
    moved = [float((after - before).norm()) for before, after in pairwise(whole)]
    gaps = [float((ours - theirs).norm()) for ours, theirs in zip(eight[1:], whole[1:], strict=True)]
    assert gaps[0] < 1e-10 < gaps[1]  # nothing is rounded before the first step
    assert all(gap < 0.05 * sum(moved[: index + 1]) for index, gap in enumerate(gaps))


def test_a_run_of_blocks_at_a_time_gives_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _randn(0, 100, 30)
    keys = {"block_size": 64, "min_elements": 1, **ADAM}
    expected = _steps(lambda p: AdamW8bit(p, **keys), start, 3)
    monkeypatch.setattr(whole_tensor, "_ELEMENTS_AT_ONCE", 100)  # runs of 128, and a last one of 56
    _equal(_steps(lambda p: AdamW8bit(p, **keys), start, 3), expected)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_value_becomes_the_nearest_of_256_shares_of_its_blocks_largest(is_signed: bool) -> None:
    table = torch.tensor(_table(is_signed), dtype=torch.float64)
    assert len(table) == 256 and bool((table.diff() > 0).all()) and {0.0, 1.0} <= set(table.tolist())
    values = _randn(3, 50) if is_signed else _randn(3, 50).square()
    quantized = _Quantized(torch.zeros(50, dtype=torch.uint8), torch.zeros(4), 16, is_signed)
    quantized.encode(values)
    scales = torch.stack([block.abs().max() for block in values.split(16)]).float().double()
    wide = scales.repeat_interleave(16)[:50, None]
    nearest = table[(values[:, None] - wide * table).abs().argmin(dim=1)] * wide[:, 0]
    torch.testing.assert_close(quantized.decoded(torch.float64), nearest)
    quantized.encode(torch.zeros(50, dtype=torch.float64))
    assert not quantized.decoded(torch.float64).any()


MUON: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8, "ns_steps": 4}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(6, 4), (3, 8)])
def test_orthogonal_updates_are_torchs_muon(shape: tuple[int, int], adjust: str, nesterov: bool) -> None:
    keys, start = {**MUON, "nesterov": nesterov, "adjust_lr_fn": adjust}, _randn(0, *shape)
    found = _steps(lambda p: Orthogonal(p, ns_dtype="bfloat16", row_beta=None, **keys), start, 3)
    _equal(found, _steps(lambda p: torch.optim.Muon(p, **keys), start, 3), rtol=0.02, atol=0.01)


def test_a_kernel_is_a_matrix_and_what_is_none_or_a_heads_is_adamws() -> None:
    kernel = _randn(0, 4, 3, 2, 2)
    matrix = _steps(lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **MUON), kernel.view(4, -1), 3)
    _equal(_steps(lambda p: MuonAdamW(p, **MUON), kernel, 3), [step.view_as(kernel) for step in matrix])
    keys = {"betas": (0.8, 0.9), "eps": 1e-3, "lr": 0.1, "weight_decay": 0.3}
    for start, group in ((_randn(0, 5), {}), (_randn(0, 4, 3), {"use_muon": False})):
        found = _steps(lambda p, group=group: MuonAdamW([{"params": p, **group}], **keys), start, 3)  # type: ignore[misc]
        _equal(found, _steps(lambda p: torch.optim.AdamW(p, **keys), start, 3))


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("row_beta", [None, 0.5])
def test_torchs_muon_runs_where_it_can(ns_dtype: str, row_beta: float | None) -> None:
    """It orthogonalizes in bfloat16, and leaves rows as they are."""
    params = [nn.Parameter(_randn(0, 3, 2))]
    optimizer = MuonAdamW(params, ns_dtype=ns_dtype, row_beta=row_beta)
    is_torchs = ns_dtype == "bfloat16" and row_beta is None
    assert type(optimizer._muon(optimizer.param_groups[0], params)) is (torch.optim.Muon if is_torchs else Orthogonal)


def test_normuon_gives_rows_one_size_and_the_whole_its_own() -> None:
    """https://arxiv.org/abs/2510.05491, algorithm 1: after one step the running mean is of that step alone."""
    keys, start = {**MUON, "weight_decay": 0.0, "ns_dtype": "float64"}, _randn(0, 5, 8)
    plain, rows = (_steps(lambda p, b=beta: MuonAdamW(p, row_beta=b, **keys), start, 2) for beta in (None, 0.6))  # type: ignore[misc]
    (first, by_rows), (second, later) = (
        (a - b, c - d) for a, b, c, d in zip(plain[1:], plain, rows[1:], rows, strict=False)
    )
    assert float(by_rows.norm(dim=1).std()) < 1e-6 < float(first.norm(dim=1).std())
    torch.testing.assert_close(by_rows.norm(), first.norm())
    # The gradients do not depend on the parameter, so both have the same update before rows are divided.
    squares = [update.square().mean(dim=1, keepdim=True) for update in (first, second)]
    expected = second / (0.6 * 0.4 * squares[0] + 0.4 * squares[1]).sqrt()
    torch.testing.assert_close(later, expected * (second.norm() / expected.norm()))
    _equal(
        _steps(lambda p: NorMuonAdamW(p, **keys), start, 2),
        _steps(lambda p: MuonAdamW(p, row_beta=0.95, **keys), start, 2),
    )


def test_shampoos_first_step_is_orthogonal_in_each_block_and_as_long_as_adams() -> None:
    """https://arxiv.org/abs/2309.06497: of G = U S V^T, (G G^T)^(-1/4) G (G^T G)^(-1/4) is U V^T."""
    start, size = _randn(0, 5, 4), 3
    keys = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.0}
    _, after = _steps(lambda p: Shampoo(p, weight_decay=0.5, block_size=size, matrix_eps=1e-12, **keys), start)
    expected, grad = start * (1 - 0.1 * 0.5), _randn(100, 5, 4)
    for rows in (slice(0, 3), slice(3, 5)):
        for columns in (slice(0, 3), slice(3, 4)):
            u, _, v = torch.linalg.svd(grad[rows, columns], full_matrices=False)
            turned, adams_length = u @ v, math.sqrt(grad[rows, columns].numel())  # Adam's first step is the sign
            expected[rows, columns] -= 0.1 * turned * adams_length / turned.norm()
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


def test_shampoos_root_adds_a_share_of_the_largest_eigenvalue() -> None:
    turn = torch.linalg.qr(_randn(0, 3, 3)).Q
    root = _inverse_fourth_root(turn @ torch.diag(torch.tensor([16.0, 1.0, 0.0]).double()) @ turn.T, 0.5)
    torch.testing.assert_close(root, turn @ torch.diag(torch.tensor([24.0, 9.0, 8.0]).double().pow(-0.25)) @ turn.T)
    assert not _inverse_fourth_root(torch.zeros(2, 2), 0.5).any()


def test_shampoo_takes_adams_steps_where_there_is_no_matrix() -> None:
    _equal(
        _steps(lambda p: Shampoo(p, **ADAM), _randn(0, 9), 4),
        _steps(lambda p: torch.optim.AdamW(p, **ADAM), _randn(0, 9), 4),
    )


def test_shampoos_means_run_and_its_roots_are_taken_every_so_many_steps() -> None:
    param = nn.Parameter(_randn(0, 3, 3))
    optimizer = Shampoo([param], frequency=2, betas=(0.9, 0.6))
    roots, left = [], torch.zeros(3, 3, dtype=torch.float64)
    for step in range(4):
        param.grad = _randn(100 + step, 3, 3)
        left = 0.6 * left + 0.4 * param.grad @ param.grad.T
        optimizer.step()
        state: Mapping[str, Tensor] = optimizer.state[param]
        torch.testing.assert_close(state["left"].view(3, 3), left)
        roots.append(state["left_root"].view(3, 3).clone())
    assert torch.equal(roots[0], roots[1]) and torch.equal(roots[2], roots[3]) and not torch.equal(roots[1], roots[2])
    values, vectors = torch.linalg.eigh(roots[0])
    fourth = vectors @ torch.diag(values**-4) @ vectors.T  # root^-4: the mean without its start at zero
    torch.testing.assert_close(fourth, _randn(100, 3, 3) @ _randn(100, 3, 3).T, rtol=1e-3, atol=1e-3)


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    param = nn.Parameter(_randn(0, 3))

    def closure() -> Tensor:
        (loss := param.square().sum()).backward()
        return loss

    before = float(param.detach().square().sum())
    assert AdamW8bit([param]).step(closure).item() == before and param.grad is not None
    assert float(param.detach().square().sum()) < before


def test_what_has_no_gradient_or_no_elements_is_left_alone() -> None:
    params = [nn.Parameter(_randn(0, 3)), nn.Parameter(_randn(0, 0, 2)), nn.Parameter(_randn(0, 2, 2))]
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    for cls in (AdamW8bit, MuonAdamW, Shampoo):
        optimizer = cls(params)
        optimizer.step()
        assert [bool(optimizer.state.get(param)) for param in params] == [True, False, False]


@pytest.mark.parametrize(
    ("cls", "keys"),
    [(AdamW8bit, {"min_elements": 1}), (AdamW8bit, {}), (MuonAdamW, {"ns_dtype": "float64"}), (Shampoo, {})],
)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 2, 3)])
def test_a_tensor_in_another_order_of_memory_takes_the_same_steps(
    cls: Any, keys: dict[str, Any], shape: tuple[int, ...]
) -> None:
    start, grads = _randn(0, *shape), [_randn(step, *shape) for step in (1, 2, 3)]
    found = []
    for is_turned in (False, True):
        # Rows and columns of a matrix, or channels of a kernel, change places in memory.
        param = nn.Parameter(start.transpose(0, 1).contiguous().transpose(0, 1) if is_turned else start.clone())
        optimizer = cls([param], **keys)
        for grad in grads:
            param.grad = grad.clone(memory_format=torch.preserve_format)
            optimizer.step()
        found.append(param.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
