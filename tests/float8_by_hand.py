"""Linear layers in float8 by the formats' definitions, without torch's float8: the reference for the package's."""

from __future__ import annotations

import re
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


@cache
def representable(exponent_bits: int, mantissa_bits: int) -> Tensor:
    """All numbers from 0 to the largest, in order: of (4, 3) e4m3fn, where one code alone is NaN; of (5, 2) e5m2."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    # e5m2 keeps its last exponent for inf and NaN, as IEEE's formats do; e4m3fn only the last of its codes.
    num_codes = 2**exponent_bits * steps - (1 if exponent_bits == 4 else steps)
    codes = [divmod(code, steps) for code in range(num_codes)]
    values = [(m / steps + (e > 0)) * 2.0 ** (max(e, 1) - bias) for e, m in codes]
    return torch.tensor(values, dtype=torch.float64)


def rounded(matrix: Tensor, exponent_bits: int, mantissa_bits: int) -> tuple[Tensor, Tensor]:
    """Each row over its scale, rounded to the nearest representable number (ties to even), and the scales."""
    table = representable(exponent_bits, mantissa_bits)
    scales = matrix.double().abs().amax(dim=1, keepdim=True) / table[-1]
    sizes = torch.where(scales > 0, matrix.double() / scales, 0.0).abs()
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(sizes.contiguous(), middles)
    is_tie = middles[codes.clamp(max=len(middles) - 1)] == sizes
    codes = codes + (is_tie & (codes % 2 == 1))
    return table[codes] * matrix.double().sign(), scales


def scaled_back(matrix: Tensor, exponent_bits: int, mantissa_bits: int) -> Tensor:
    """In float64."""
    values, scales = rounded(matrix, exponent_bits, mantissa_bits)
    return values * scales


class _ByHand(torch.autograd.Function):
    """``x @ weight.T``, all of it in float64 whatever comes in and goes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return (scaled_back(x, 4, 3) @ scaled_back(weight, 4, 3).t()).to(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = scaled_back(grad, 5, 2)
        grad_x, grad_weight = grad @ scaled_back(weight.t(), 4, 3).t(), grad.t() @ scaled_back(x, 4, 3)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    rows = _ByHand.apply(x.flatten(0, -2), self.weight)
    return (rows if self.bias is None else rows + self.bias.to(rows.dtype)).unflatten(0, x.shape[:-1])


def multiply_by_hand(model: nn.Module, pattern: str) -> None:
    """Have the linear layers whose names match multiply so; in place."""
    for name, layer in model.named_modules():
        if pattern and isinstance(layer, nn.Linear) and re.search(pattern, name):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
