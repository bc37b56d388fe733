"""Linear layers in float8 by the formats' definitions, without torch's float8: the reference for the package's."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.resolve.resolved import Float8Plan


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
    return _nearest(torch.where(scales > 0, matrix.double() / scales, 0.0), table), scales


def rounded_in_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Each 32 elements of a row over the least power of two that leaves none above 448, in e4m3, and the scales.

    Scales are (n, k): each element's.
    """
    powers = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)
    blocks = matrix.double().split(32, dim=1)
    largest = [block.abs().amax(dim=1, keepdim=True) for block in blocks]
    scales = [
        powers[torch.searchsorted(448 * powers, found)].expand_as(b) for found, b in zip(largest, blocks, strict=True)
    ]
    return _nearest(matrix.double() / torch.cat(scales, dim=1), representable(4, 3)), torch.cat(scales, dim=1)


def as_sent_by_hand(weight: Tensor) -> Tensor:
    """Each row over the least power of two that leaves no element above 448, in e4m3, and scaled back; in float64."""
    powers = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    scales = powers[torch.searchsorted(448 * powers, largest)]
    return _nearest(weight.double() / scales, representable(4, 3)) * scales


def _nearest(matrix: Tensor, table: Tensor) -> Tensor:
    """The representable number nearest to each element; ties to even."""
    sizes = matrix.abs()
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(sizes.contiguous(), middles)
    is_tie = middles[codes.clamp(max=len(middles) - 1)] == sizes
    codes = codes + (is_tie & (codes % 2 == 1))
    return table[codes] * matrix.sign()


def scaled_back(matrix: Tensor, scales: str, is_gradient: bool = False) -> Tensor:
    """In float64, of scales as ``Float8Plan`` names them."""
    if scales == "rows":
        values, factors = rounded(matrix, 5, 2) if is_gradient else rounded(matrix, 4, 3)
        return values * factors
    largest = matrix.double().abs().amax(dim=1, keepdim=True)
    rows = torch.where(largest > 0, largest, 1.0) if is_gradient else torch.ones_like(largest)
    values, factors = rounded_in_blocks(matrix.double() / rows)
    return values * factors * rows


class _ByHand(torch.autograd.Function):
    """``x @ weight.T``, all of it in float64 whatever comes in and goes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: str, is_sent: bool) -> Tensor:
        ctx.dtype = weight.dtype
        weight = as_sent_by_hand(weight) if is_sent else weight
        ctx.save_for_backward(x, weight)
        ctx.scales = scales
        out = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return (scaled_back(x, scales) @ scaled_back(weight, scales).t()).to(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        grad = scaled_back(grad, ctx.scales, is_gradient=True)
        grad_x, grad_weight = grad @ scaled_back(weight.t(), ctx.scales).t(), grad.t() @ scaled_back(x, ctx.scales)
        return grad_x.to(x.dtype), grad_weight.to(ctx.dtype), None, None


def _forward(self: nn.Linear, x: Tensor, plan: Float8Plan) -> Tensor:
    rows = _ByHand.apply(x.flatten(0, -2), self.weight, plan.scales, plan.gather)
    return (rows if self.bias is None else rows + self.bias.to(rows.dtype)).unflatten(0, x.shape[:-1])


def multiply_by_hand(model: nn.Module, plan: Float8Plan) -> None:
    """Have the linear layers whose names match multiply so; in place."""
    for name, layer in model.named_modules():
        if plan.layers and isinstance(layer, nn.Linear) and re.search(plan.layers, name):
            layer.forward = partial(_forward, layer, plan=plan)  # type: ignore[method-assign]
