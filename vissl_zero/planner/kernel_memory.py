"""Memory that CPU kernels take in addition to their outputs, which torch's fake tensors do not show.

All numbers were measured with the profiler of torch 2.13, on processors with AVX-512, without and with AMX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_BLOCK = 16  # oneDNN pads channels to a multiple of this number
_TILE = 32  # the channels of a group, for AMX
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")  # ONEDNN_MAX_CPU_ISA


def convolution_scratch(args: Sequence[Any], result: Any) -> int:
    """Return the bytes that a convolution takes while it runs.

    torch unfolds float64 images into columns, one group at a time, and joins the groups' results. oneDNN copies images
    and outputs into its own layouts, unless channels are last, and sums the gradients of half formats in float32. It
    pads channels to whole blocks, but reads images with fewer than ``_BLOCK`` without a copy. In the backward pass with
    half formats, few channels or a stride, it transposes one image and its outputs at a time. For depthwise
    convolutions with channels last and large kernels, it computes whole blocks of channels.
    """
    is_backward = isinstance(result, tuple)
    images, weight, is_transposed, groups = (args[index + is_backward] for index in (0, 1, 6, 8))
    outputs = args[0] if is_backward else result
    kernel = weight.shape[2:].numel()
    is_half = images.itemsize < 4
    if kernel == 1 and groups == 1 and not is_half:
        return 0
    if images.dtype == torch.float64:
        few, many = (outputs, images) if is_transposed else (images, outputs)
        columns = few.shape[1] // groups * kernel * many.shape[2:].numel() * images.itemsize
        columns *= 1 if is_transposed and is_backward else len(images)
        if groups == 1:
            return columns
        of_group = (images.nbytes + (outputs.nbytes if is_backward else 0)) // groups
        return max(columns + of_group, images.nbytes + weight.nbytes if is_backward else outputs.nbytes)
    is_depthwise = groups > 1 and weight.shape[1] == 1
    if images.dtype == torch.bfloat16 and _has_amx() and not is_depthwise:
        return _tiled_scratch(images, weight, outputs, groups, is_backward)
    if _has_channels_last(images) and weight.shape[1] == 1 and kernel > 9 and is_backward:
        wide = 2 * weight.nbytes if is_half else 0
        blocks = _BLOCK**2 * (weight.nbytes + wide)
        return blocks + (2 * (images.nbytes + outputs.nbytes) if is_half else weight.nbytes)
    is_few = groups == 1 and images.shape[1] < _BLOCK
    copied, blocked = (int(part.nbytes * _padding(part, groups)) for part in (images, outputs))
    if is_few:
        copied = 0
    if not is_backward:
        if _has_channels_last(images):
            return 2 * weight.nbytes
        return max(copied + weight.nbytes + blocked - outputs.nbytes, blocked)
    padded = int(weight.nbytes * _padding(images, groups) * _padding(outputs, groups))
    is_strided = max(args[4]) > 1 and not _has_channels_last(images)
    one = (images.nbytes + blocked) // max(len(images), 1) if groups == 1 and (is_half or is_few or is_strided) else 0
    sums = one + (2 * weight.nbytes if is_half else 0)
    if _has_channels_last(images):
        return 2 * weight.nbytes + padded + sums
    sums += weight.nbytes if is_half and kernel > 1 else 0
    copies = max(copied + blocked, 2 * images.nbytes if is_half and not is_few else 0)
    return max(copies + padded - weight.nbytes + sums, padded)


@cache
def _has_amx() -> bool:
    """Check whether oneDNN may use AMX, the matrix unit of newer Intel processors."""
    most = _most_instructions()
    return (most in ("ALL", "DEFAULT") or "AMX" in most) and _has_instructions("amx_tile")


@cache
def _has_bfloat16() -> bool:
    """Check whether oneDNN may multiply in bfloat16; where it may not, it compiles no kernels for matrix products."""
    return _most_instructions() not in _WITHOUT_BFLOAT16 and _has_instructions("avx512_bf16")


def _most_instructions() -> str:
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()


def _has_instructions(name: str) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # Older versions of torch have no such function.
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get(name))
    return Path("/proc/cpuinfo").is_file() and f" {name} " in Path("/proc/cpuinfo").read_text()


def _tiled_scratch(images: Tensor, weight: Tensor, outputs: Tensor, groups: int, is_backward: bool) -> int:
    """Return the bytes that a bfloat16 convolution takes on a processor with AMX.

    The forward pass sums in float32. The backward pass sums gradients of padded weights in float32, and tiles one image
    at a time. An upper bound where channels are last: kernels choose among several ways.
    """
    is_last, has_pixels = _has_channels_last(images), weight.shape[2:].numel() > 1
    of_images, of_outputs = (max(1.0, _TILE * groups / part.shape[1]) for part in (images, outputs))
    padded = int(weight.nbytes * of_images * of_outputs) if of_images * of_outputs > 1 else 0
    if not is_backward:
        weights = weight.nbytes + padded
        if is_last:
            return weight.nbytes + weights + (outputs.nbytes if has_pixels else 0)
        sums = 2 * outputs.nbytes
        return max(images.nbytes + weights + sums - outputs.nbytes, sums)
    one = int(images.nbytes * of_images + outputs.nbytes * of_outputs) // max(len(images), 1)
    of_both = images.nbytes + int(outputs.nbytes * (of_outputs if groups == 1 else 1))
    copies = 0 if is_last else max(of_both, 2 * images.nbytes)
    weights = (5 if is_last else 2 + has_pixels) * weight.nbytes
    return copies + one + max(weights, 2 * padded + weight.nbytes)


def _padding(images: Tensor, groups: int) -> float:
    """Return the factor by which padding to whole blocks increases the channels; 1 without padding."""
    channels = images.shape[1]
    return -(-channels // _BLOCK) * _BLOCK / channels if groups in (1, channels) else 1.0


def _has_channels_last(images: Tensor) -> bool:
    return images.dim() == 4 and images.stride(1) == 1 and images.shape[1] > 1 and not images.is_contiguous()


def lstm_workspace(inputs: Tensor, hidden_size: int) -> int:
    """Return the bytes that a layer of oneDNN's LSTM keeps for its backward pass; torch's fake layer keeps none.

    It has gates, states and their gradients. The result is within 3 % of measurements with torch 2.13, except for
    layers below a megabyte. Rows of whole KiB are padded. Half formats keep gradients and cells in float32.

    Args:
        inputs: inputs, (T, B, C).
        hidden_size: width of the states.
    """
    num_steps, batch, width = inputs.shape

    def row(num_elements: int, itemsize: int) -> int:
        return num_elements * itemsize + (0 if num_elements * itemsize % 1024 else 64)

    own, full, widest = inputs.itemsize, 4, max(width, hidden_size)
    states = row(widest, own) + 2 * row(widest, full) + (3 * row(hidden_size, own) + 2 * row(hidden_size, full)) // 2
    return num_steps * batch * row(4 * hidden_size, own) + 2 * (num_steps + 1) * batch * states + 2**14


def lstm_scratch(args: Sequence[Any], result: Any) -> int:
    """Return the bytes that a layer of oneDNN's LSTM takes while it runs.

    These are gates, and weights in its own layout. The backward pass adds gradients, in float32 for half formats, and
    a padded copy of each weight with rows of whole KiB.
    """
    inputs, *weights = args[:3]
    is_backward = len(result) > _NUM_OUTPUTS
    num_bytes = sum(weight.nbytes for weight in weights)
    gates = inputs.shape[0] * inputs.shape[1] * weights[0].shape[0] * inputs.itemsize
    if not is_backward:
        return num_bytes + gates
    if inputs.itemsize < 4:
        return 3 * num_bytes + gates
    padded = sum(weight.nbytes for weight in weights if weight.shape[1] * weight.itemsize % 1024 == 0)
    return (num_bytes + padded) * 17 // 16 + gates


def batch_norm_scratch(args: Sequence[Any], result: Any) -> int:
    """Return the bytes that the backward pass of batch norm takes: a second result, or float32 copies."""
    gradient, images = args[:2]
    if gradient.stride() == images.stride():
        return int(images.nbytes)
    return 2 * images.nbytes if images.itemsize < 4 and not _has_channels_last(gradient) else 0


def contiguous_scratch(args: Sequence[Any], result: Any) -> int:
    """Return the bytes of inputs that a kernel copies because they are not contiguous."""
    return sum(tensor.nbytes for tensor in args[:2] if isinstance(tensor, Tensor) and not tensor.is_contiguous())


# What a kernel of oneDNN keeps once it is compiled for given shapes: its code, and tables of its tiles. Matrix products
# kept 540 to 790 KiB, mostly tables; convolutions 65 to 224 KiB forward, and 85 to 370 KiB for both gradients.
_PRODUCT_BYTES = 600 * 2**10
_CONVOLUTION_BYTES = {
    _aten.convolution.default: 128 * 2**10,
    _aten.convolution_backward.default: 256 * 2**10,
}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def compiled_kernel(func: Any, args: Sequence[Any]) -> tuple[Hashable, int] | None:
    """Return what identifies the kernel that oneDNN compiles for an operation in a half format, and the bytes it keeps.

    One kernel serves all operations with the same shapes and strides. In float32, where few operations have a kernel of
    their own, it is None: the bytes of a process include those (``resident.py``).
    """
    num_bytes = _PRODUCT_BYTES if func in _PRODUCTS and _has_bfloat16() else _CONVOLUTION_BYTES.get(func, 0)
    if not num_bytes or args[0].itemsize != 2:
        return None
    layouts = tuple((tuple(arg.shape), arg.stride()) for arg in args if isinstance(arg, Tensor))
    settings = tuple(tuple(arg) for arg in args if isinstance(arg, list | tuple))
    return (func, layouts, settings), num_bytes


_NUM_OUTPUTS = 4  # results of a layer's forward pass: outputs, both states, workspace
SCRATCH: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    _aten.convolution.default: convolution_scratch,
    _aten.convolution_backward.default: convolution_scratch,
    _aten.native_batch_norm_backward.default: batch_norm_scratch,
    _aten.native_layer_norm.default: contiguous_scratch,
    _aten.native_layer_norm_backward.default: contiguous_scratch,
    _aten.roll.default: lambda args, result: result.nbytes if len(args[1]) > 1 else 0,  # the result between two rolls
    _aten.mkldnn_rnn_layer.default: lstm_scratch,
    _aten.mkldnn_rnn_layer_backward.default: lstm_scratch,
}
