"""Linear layers that multiply in 8-bit floats, forward and backward, with the same numbers at every level.

Input and weight are rounded to float8_e4m3fn and the gradient of the output to float8_e5m2 (the formats and their uses:
https://arxiv.org/abs/2209.05433). Every row has a scale of its own, its largest magnitude over the largest float8,
found anew each time. A row is a token of the input and of the gradient; of the weight it is an output channel, and an
input channel in the backward pass. Products accumulate in float32. Weights, and what the optimizer does to them, stay
as they are: a gathered weight is rounded where it is used.

So no scale depends on which other tokens a rank holds or on how weights are cut. A gradient of a weight is a sum over
tokens, whose scales stand inside the sum, where no float8 product applies them: both operands are scaled back and
multiplied in the format of the layer's output, so that a token adds the same wherever it is computed. One scale for a
whole tensor, as in torchao's default recipe, would make that product faster, but it is the largest magnitude of the
rank's own batch: over 2 ranks a gradient then differs from one process's by a tenth, and with a scale per row by
rounding alone (both measured in ``tests/dist/test_float8.py``).

Where the product of a GPU cannot be used (on a CPU, in float64, a width that 16 does not divide), the same float8
numbers are multiplied in float32, or in float64: emulated, which saves memory and no time.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.sharding.torch_private import reshaped, scaled_product

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_SIDE = 16  # which the kernel wants to divide the layer's two widths


class Rows(NamedTuple):
    """A matrix in float8, scaled row by row: ``values * scales``.

    Attributes:
        values: (n, k) float8.
        scales: (n, 1), in float32, or in float64 where the matrix was.
    """

    values: Tensor
    scales: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The matrix (n, k) scaled back, in ``dtype``."""
        return (self.values.to(self.scales.dtype) * self.scales).to(dtype)


def quantize(matrix: Tensor, dtype: torch.dtype) -> Rows:
    """Round a matrix (n, k) to float8, each row over its own largest magnitude.

    The error of an element is at most 2**-4 of it (2**-3 in e5m2), or half the smallest float8 times the row's scale. A
    row of zeros stays one. An inf or NaN makes its row NaN in every product, and no other row.
    """
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    largest = wide.abs().amax(dim=1, keepdim=True)
    scales = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(wide.dtype).tiny)
    return Rows((wide / scales).to(dtype), scales)


def product(a: Rows, b: Rows, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, (n, m) in ``dtype``, of (n, k) in either format and (m, k) in e4m3."""
    sides = (*a.values.shape, len(b.values))
    has_kernel = a.values.is_cuda and a.scales.dtype == torch.float32
    if has_kernel and sides[0] and sides[1] % _SIDE == sides[2] % _SIDE == 0:
        return scaled_product(a.values, a.scales, b.values, b.scales).to(dtype)
    wide = a.scales.dtype
    return (a.values.to(wide) @ b.values.to(wide).t() * a.scales * b.scales.t()).to(dtype)


class _Product(torch.autograd.Function):
    """``x @ weight.T`` of x (n, k) and weight (m, k), in ``dtype``. Keeps x in float8 and the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rows = quantize(x, _FORWARD)
        ctx.save_for_backward(*(rows if weight.requires_grad else (None, None)), weight)
        ctx.formats = x.dtype, dtype
        return product(rows, quantize(weight, _FORWARD), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, scales, weight = ctx.saved_tensors
        of_input, of_output = ctx.formats
        grad_x = grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = quantize(grad, _BACKWARD)
            if ctx.needs_input_grad[0]:
                grad_x = product(rows, quantize(weight.t().contiguous(), _FORWARD), of_input)
            if ctx.needs_input_grad[1]:
                x = Rows(values, scales)
                grad_weight = (rows.wide(of_output).t() @ x.wide(of_output)).to(weight.dtype)
        return grad_x, grad_weight, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8. Its parameters, and the format of its output, are ``nn.Linear``'s."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in autocast's format where that is on."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        flat = input.reshape(math.prod(input.shape[:-1]), self.in_features)
        with torch.autocast(device, enabled=False):
            output: Tensor = _Product.apply(flat, self.weight, dtype)
        output = reshaped(output, (*input.shape[:-1], self.out_features))
        return output if self.bias is None else output + self.bias.to(dtype)


def quantize_layers(model: nn.Module, pattern: str) -> None:
    """Make the linear layers whose names match ``Float8Linear``, in place. An empty pattern matches none.

    Parameters, names and hooks stay. Subclasses of ``nn.Linear``, which may compute otherwise, stay too.
    """
    for name, layer in _linear_layers(model).items():
        if pattern and re.search(pattern, name):
            layer.__class__ = Float8Linear


def require_float8(model: nn.Module, pattern: str, device: torch.device, key: str = "config.MODEL.FLOAT8") -> None:
    """Refuse a model, or a device, for which ``quantize_layers`` cannot do what is asked. Changes nothing.

    Args:
        model: whole.
        pattern: of layers; empty: float8 is off, and nothing is refused.
        device: where to train.
        key: what the message names.
    Raises:
        ConfigError: nothing matches, or the GPU has no products of float8.
    """
    if not pattern:
        return
    names, found = _linear_layers(model), []
    if not any(re.search(pattern, name) for name in names):
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
        fix = f"Linear layers of this model: {', '.join(kinds) or 'none'}."
        found.append(Problem(key, repr(pattern), "must match the name of a linear layer", fix))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _LEAST_CAPABILITY
    if capability < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        must = f"needs a GPU of compute capability {least} or above, which multiplies float8"
        fix = "Turn it off: bfloat16 is what this GPU has."
        found.append(Problem(key, f"capability {'.'.join(map(str, capability))}", must, fix))
    if found:
        raise ConfigError(found)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By full name."""
    return {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Linear, Float8Linear)}
