"""Linear layers that multiply in 8-bit floats, forward and backward, with the same numbers at every level.

A row is a token of the input and of the output's gradient; of the weight it is an output channel, and an input channel
in the backward pass. There are two ways to scale. Scales are computed in each product, from its operands:

- ``rows``: each row has a scale, its largest magnitude over the largest float8. Input and weight are float8_e4m3fn, the
  gradient of the output is float8_e5m2 (the formats and their uses: https://arxiv.org/abs/2209.05433).
- ``mx``: each 32 elements of a row, which one product sums, share a power of two; all are float8_e4m3fn. This is MXFP8
  (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). That text's own scale cuts
  off what lies between 448 and 512 of it; ours is the least power of two that cuts nothing off, as cuBLAS does
  (https://docs.nvidia.com/cuda/cublas/#d-block-quantization). With it, and e4m3 for gradients too, training matches
  bfloat16 (https://arxiv.org/abs/2506.08027). A token's gradient is divided by its largest magnitude first, and its
  product multiplied by that: with a loss that is a mean over a rank's samples, 3 ranks have 3 times the gradient of one
  process, which powers of two would round otherwise.

Products accumulate in float32. Weights, and their updates, keep their dtype: a full weight is rounded where it is used.
With ``Float8Plan.gather`` it is first rounded as level 3 sends it (``packed``). Rounding twice in this way gives the
same bits as rounding once, so a layer rounds at every level, whether its weight was sent or not.

So no scale depends on a rank's other tokens or on how weights are cut. A gradient of a weight is a sum over tokens.
Their scales are inside the sum, where no product of scaled rows applies them; with MX, 32 tokens would share one, and
which 32 depends on the rank's batch. So both operands are scaled back and multiplied in the dtype of the layer's
output, and a token contributes the same on any rank. One scale for a whole tensor, as in torchao's default recipe,
would make that product faster, but it is the largest magnitude of the rank's own batch: over 2 ranks a gradient then
differs from one process's by a tenth, and with a scale per row by rounding alone (both measured in
``tests/dist/test_float8.py``).

Where the product of a GPU cannot be used (on a CPU, in float64, a width that 16 does not divide), the same float8
numbers are multiplied in float32, or in float64: emulated, which saves memory and no time.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.resolved import Float8Plan
from vissl_zero.sharding.torch_private import scaled_product

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 2.0**-9  # of e4m3, above 0
_SIDE = 16  # kernels need multiples of it as the layer's two widths
_BLOCK = 32  # elements that share a scale in MX
_EXPONENT_BIAS, _NO_NUMBER = 127, 255  # of float8_e8m0fnu, which holds powers of two and NaN, and of float32
_MANTISSA_BITS = 23  # of float32


class Rows(NamedTuple):
    """A matrix in float8, scaled row by row: ``values * scales``.

    Attributes:
        values: (n, k) float8.
        scales: (n, 1), in float32, or in float64 where the matrix was.
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def of(matrix: Tensor, *, is_gradient: bool) -> Rows:
        """Round a matrix (n, k): to e4m3, a gradient to e5m2, because its magnitudes differ more."""
        return quantize(matrix, _E5M2 if is_gradient else _E4M3)

    def matmul_t(self, other: Rows, dtype: torch.dtype) -> Tensor:
        """Return ``self @ other.T``: see ``product``."""
        return product(self, other, dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (n, k) in ``dtype``."""
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
    """Multiply ``a @ b.T``, (n, m) in ``dtype``, with a (n, k) in either format and b (m, k) in e4m3."""
    sides = (*a.values.shape, len(b.values))
    has_kernel = a.values.is_cuda and a.scales.dtype == torch.float32
    if has_kernel and sides[0] and sides[1] % _SIDE == sides[2] % _SIDE == 0:
        return scaled_product(a.values, a.scales, b.values, b.scales).to(dtype)
    wide = a.scales.dtype
    # Scales of rows are factors of the sum over k, so they may follow it.
    return (a.values.to(wide) @ b.values.to(wide).t() * a.scales * b.scales.t()).to(dtype)


class Blocks(NamedTuple):
    """A matrix in MXFP8: each 32 elements of a row share a scale; the last block may have fewer.

    Attributes:
        values: (n, k) float8_e4m3fn.
        scales: (n, ceil(k / 32)) float8_e8m0fnu, a byte each.
        factors: (n, 1) float32 or float64, the largest magnitudes of a gradient's rows; None: not a gradient.
    """

    values: Tensor
    scales: Tensor
    factors: Tensor | None = None

    @staticmethod
    def of(matrix: Tensor, *, is_gradient: bool) -> Blocks:
        """Round a matrix (n, k), each block over the least power of two that leaves no element above 448.

        The error of an element is at most 2**-4 of it, or 2**-10 times the scale. A block of zeros stays one. A block
        with an inf, a NaN or a magnitude above 2**135 becomes NaN, and no other block; of a gradient, the row does.
        """
        num_rows, width = matrix.shape
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        factors = None
        if is_gradient:
            # With 3 ranks a gradient is 3 times that of one process, and powers of two would round it differently.
            factors = wide.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
            wide = wide / factors
        blocks = F.pad(wide, (0, -width % _BLOCK)).view(num_rows, math.ceil(width / _BLOCK), _BLOCK)
        # In e8m0: the least power of two that is large enough for the largest magnitude, or NaN.
        codes = (_exponents(blocks.abs().amax(dim=2)) + _EXPONENT_BIAS).clamp(0, _NO_NUMBER)
        scales = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
        return Blocks((wide / _widened(scales, width, wide.dtype)).to(_E4M3), scales, factors)

    def matmul_t(self, other: Blocks, dtype: torch.dtype) -> Tensor:
        """Return ``self @ other.T`` (n, m) in ``dtype`` of (n, k) and (m, k); ``other`` must not be a gradient."""
        num_rows, width = self.values.shape
        exact = torch.promote_types(dtype, torch.float32)
        has_kernel = self.values.is_cuda and exact == torch.float32 and num_rows > 0
        if has_kernel and width % _BLOCK == len(other.values) % _SIDE == 0:
            product = _block_scaled_product(self.values, self.scales, other.values, other.scales)
            return (product if self.factors is None else product * self.factors).to(dtype)
        return (self.dequantize(exact) @ other.dequantize(exact).t()).to(dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (n, k) in ``dtype``."""
        exact = torch.promote_types(dtype, torch.float32)
        values = self.values.to(exact) * _widened(self.scales, self.values.shape[1], exact)
        return (values if self.factors is None else values * self.factors).to(dtype)


def packed(weight: Tensor) -> Rows:
    """Round a weight (n, k) for sending: each row over the least power of two that leaves no element above 448.

    The error of an element is at most 2**-4 of it, or 2**-10 times the scale; scales are in float32, and no less than
    2**-126. ``unpacked`` in the weight's own format is exact, and packed again gives the same numbers. A row with an
    inf, a NaN or a magnitude above 2**135 becomes NaN.
    """
    largest = torch.linalg.vector_norm(weight, math.inf, dim=1, keepdim=True)
    limits = torch.finfo(weight.dtype)
    # With a smaller scale, steps of e4m3 would be finer than the weight's dtype, which might not hold the scale either.
    least = math.frexp(limits.smallest_normal * limits.eps)[1] - math.frexp(_SMALLEST)[1]
    exponents = _exponents(largest.to(torch.promote_types(weight.dtype, torch.float32)))
    # A power of two built from its bits: exact on any device, and torch.compile does not support float8_e8m0fnu.
    codes = exponents.clamp(min=max(least, 1 - _EXPONENT_BIAS)) + _EXPONENT_BIAS
    scales = (codes.clamp(max=_NO_NUMBER) << _MANTISSA_BITS).view(torch.float32)
    return Rows((weight / scales.to(weight.dtype)).to(_E4M3), scales)


def unpacked(rows: Rows, out: Tensor) -> Tensor:
    """Convert rows of ``packed`` back to a weight, into ``out``; all may have leading dimensions. Exact."""
    return out.copy_(rows.values).mul_(rows.scales.to(out.dtype))


def as_sent(weight: Tensor) -> Tensor:
    """Return a weight (n, k) in its own dtype, rounded as if it was sent. Rounding twice gives the same bits."""
    return unpacked(packed(weight), torch.empty_like(weight))


def _exponents(largest: Tensor) -> Tensor:
    """Compute exponents, int32, of the least powers of two that leave no magnitude above 448; for inf, NaN's code."""
    most, exponent_of_most = math.frexp(torch.finfo(_E4M3).max)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - exponent_of_most + (mantissa > most)
    return torch.where(largest.isfinite(), exponent, _NO_NUMBER - _EXPONENT_BIAS)


def _widened(scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Repeat (n, blocks) to (n, width): the scale of each element. Exact."""
    return scales.to(dtype).repeat_interleave(_BLOCK, dim=1)[:, :width]


def _block_scaled_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """Multiply ``a @ b.T`` in MXFP8 on a GPU, (n, m) in bfloat16, accumulated in float32.

    Args:
        a: (n, k) e4m3, contiguous.
        a_scales: (n, k / 32) e8m0, scales of its blocks.
        b: (m, k) e4m3, contiguous; 32 divides k, 16 divides m.
        b_scales: (m, k / 32) e8m0, scales of its blocks.
    """
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scales = _in_tiles(a_scales), kind, _in_tiles(b_scales), kind
    product: Tensor = F.scaled_mm(a, b.t(), *scales, swizzle_a=order, swizzle_b=order, output_dtype=torch.bfloat16)
    return product


def _in_tiles(scales: Tensor) -> Tensor:
    """Order scales of blocks (n, k) as the kernel reads them, flat: tiles of 128 x 4, padded with zeros.

    A tile holds row r and column c at 16 * (r % 32) + 4 * (r // 32) + c
    (https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout).
    """
    num_rows, num_columns = scales.shape
    codes = F.pad(scales.view(torch.uint8), (0, -num_columns % 4, 0, -num_rows % 128))
    tiles = codes.view(len(codes) // 128, 4, 32, codes.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(scales.dtype)


class _Product(torch.autograd.Function):
    """``x @ weight.T`` of x (n, k) and weight (m, k), in ``dtype``. Keeps x in float8, and the weight unchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, kind: type[Rows | Blocks], is_sent: bool
    ) -> Tensor:
        scaled: Any = kind.of(x, is_gradient=False)
        # In 8 bits, and only for the weight's gradient: a frozen weight needs no input.
        ctx.save_for_backward(*(scaled[:2] if weight.requires_grad else (None, None)), weight)
        ctx.formats, ctx.kind, ctx.is_sent = (x.dtype, dtype), kind, is_sent
        operand = as_sent(weight) if is_sent else weight
        product: Tensor = scaled.matmul_t(kind.of(operand, is_gradient=False), dtype)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, scales, weight = ctx.saved_tensors
        (of_input, of_output), kind = ctx.formats, ctx.kind
        grad_x = grad_weight = None
        # A loop may call backward() under autocast, which would cast the operands.
        with torch.autocast(grad.device.type, enabled=False):
            scaled = kind.of(grad, is_gradient=True)
            if ctx.needs_input_grad[0]:
                # Rounded again, by input channels: this product sums over output channels, whose scales differ.
                operand = as_sent(weight) if ctx.is_sent else weight
                grad_x = scaled.matmul_t(kind.of(operand.t().contiguous(), is_gradient=False), of_input)
            if ctx.needs_input_grad[1]:
                x = kind(values, scales)
                # Not in float8: scales of tokens stand inside the sum over tokens (see the module).
                grad_weight = (scaled.dequantize(of_output).t() @ x.dequantize(of_output)).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8. Its parameters and the dtype of its output are those of ``nn.Linear``.

    Attributes:
        kind: class of the float8 matrices.
        least_capability: least compute capability of a GPU that multiplies such matrices.
        is_sent: round the weight first, as ranks send it; its gradient is taken at the rounded weight.
    """

    kind: ClassVar[type[Rows | Blocks]] = Rows
    least_capability: ClassVar[tuple[int, int]] = (8, 9)  # Ada; Hopper is 9.0
    is_sent: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in autocast's format where that is on."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        flat = input.reshape(math.prod(input.shape[:-1]), self.in_features)
        # Autocast would cast the operands of the products inside.
        with torch.autocast(device, enabled=False):
            output: Tensor = _Product.apply(flat, self.weight, dtype, self.kind, self.is_sent)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(dtype)


class MxLinear(Float8Linear):
    """A ``Float8Linear`` with one scale per block of 32 elements."""

    kind = Blocks
    least_capability = (10, 0)  # Blackwell


_LAYERS = {"rows": Float8Linear, "mx": MxLinear}


def quantize_layers(model: nn.Module, plan: Float8Plan) -> None:
    """Convert the linear layers whose names match to float8, in place.

    Parameters, names and hooks stay. Subclasses of ``nn.Linear`` are not converted: they may compute differently.
    """
    for name, layer in _linear_layers(model).items():
        if plan.layers and re.search(plan.layers, name):
            layer.__class__ = _LAYERS[plan.scales]
            assert isinstance(layer, Float8Linear)
            layer.is_sent = plan.gather


def sent_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights to send in float8: those of one layer, which rounds them, and of no other module."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    layers = {param: layers_of[0] for param, layers_of in owners.items() if len(layers_of) == 1}
    return {
        param
        for param, layer in layers.items()
        if isinstance(layer, Float8Linear) and layer.is_sent and param is layer.weight
    }


def require_float8(model: nn.Module, plan: Float8Plan, device: torch.device, key: str = "config.MODEL.FLOAT8") -> None:
    """Refuse a model or a device to which ``quantize_layers`` cannot apply ``plan``. Changes nothing.

    Args:
        model: whole.
        plan: layers and scales; a plan without layers is never refused.
        device: device of training.
        key: configuration key for the message.
    Raises:
        ConfigError: nothing matches, or the GPU has no products of such float8.
    """
    if not plan.layers:
        return
    names, problems = _linear_layers(model), []
    if not any(re.search(plan.layers, name) for name in names):
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
        fix = f"Linear layers of this model: {', '.join(kinds) or 'none'}."
        problems.append(Problem(key, repr(plan.layers), "must match the name of a linear layer", fix))
    if device.type == "cuda":
        problems += device_problems(plan.scales, torch.cuda.get_device_capability(device), key)
    if problems:
        raise ConfigError(problems)


def device_problems(scales: str, capability: tuple[int, int], key: str) -> list[Problem]:
    """Return the problem of a GPU that cannot multiply with ``scales``: emulation is slower than its other formats."""
    able = [name for name, layer in _LAYERS.items() if capability >= layer.least_capability]
    if scales in able:
        return []
    least, got = (".".join(map(str, version)) for version in (_LAYERS[scales].least_capability, capability))
    must = f"needs a GPU of compute capability {least} or above, which multiplies float8 with scales of {scales!r}"
    fix = f"This GPU has scales of {able[0]!r}." if able else "Turn it off: bfloat16 is what this GPU has."
    return [Problem(key, f"capability {got}", must, fix)]


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by full name."""
    return {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Linear, *_LAYERS.values())}
