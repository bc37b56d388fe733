"""What kernels take while they run, beside torch's own count of its allocations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vissl_zero.planner import kernel_memory
from vissl_zero.planner.kernel_memory import SCRATCH, compiled_kernel, convolution_scratch, lstm_scratch

HAS_WIDE_KERNELS = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
aten = torch.ops.aten


def beside_outputs(run: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes at once beyond those that stay, and what the call returns."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for _, num_bytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += num_bytes
        most = max(most, now)
    return most - now, result


def convolved(layer: nn.Conv2d, images: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Measured and counted bytes, forward and backward."""
    padding, stride = list(layer.padding), list(layer.stride)
    rest = (stride, padding, list(layer.dilation), False, [0, 0], layer.groups)
    weight = layer.weight.detach()
    forward = images, weight, None, *rest
    measured, outputs = beside_outputs(lambda: aten.convolution(*forward))
    backward = torch.randn_like(outputs), images, weight, None, *rest, [True, True, False]
    measured_again, gradients = beside_outputs(lambda: aten.convolution_backward(*backward))
    counted = convolution_scratch(forward, outputs), convolution_scratch(backward, gradients)
    return (measured, counted[0]), (measured_again, counted[1])


@pytest.mark.parametrize("groups", [1, 8])
def test_columns_and_the_results_of_groups_in_float64(groups: int) -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1, groups=groups).double()
    for measured, counted in convolved(layer, torch.randn(4, 64, 8, 8, dtype=torch.float64)):
        assert 0.97 * measured <= counted <= 1.6 * measured


@pytest.mark.skipif(not HAS_WIDE_KERNELS, reason="oneDNN's kernels for other processors take other layouts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(256, 512, 1),
        nn.Conv2d(64, 128, 3, padding=1, stride=2),
        nn.Conv2d(96, 96, 7, padding=3, groups=96),
    ],
    ids=["dense", "one pixel", "stride", "a channel a group"],
)
def test_layouts_of_convolutions(layer: nn.Conv2d, memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    images = torch.randn(8, layer.in_channels, 16, 16, dtype=dtype).to(memory_format=memory_format)
    for measured, counted in convolved(layer.to(dtype), images):
        assert counted > 0.95 * measured - 0.1 * images.nbytes - 2**17  # the kernels' own tables


@pytest.mark.skipif(not HAS_WIDE_KERNELS, reason="oneDNN's kernels for other processors take other layouts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "side"),
    [
        (nn.Conv2d(96, 192, 2, stride=2), 56),
        (nn.Conv2d(384, 768, 2, stride=2), 14),
        (nn.Conv2d(3, 96, 4, stride=4), 112),
        (nn.Conv2d(3, 64, 9, padding=4), 48),
        (nn.Conv2d(64, 3, 3, padding=1), 48),
        (nn.Conv2d(1, 256, 9), 28),
        (nn.Conv2d(24, 40, 3, padding=1), 80),
        (nn.Conv2d(20, 20, 3, padding=1), 80),
        (nn.Conv2d(24, 24, 3, padding=1, groups=24), 80),
        (nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8), 80),
    ],
    ids=[
        *("patches", "many channels", "patches of colors", "from colors", "to colors", "from gray"),
        *("24 to 40 channels", "20 channels", "24 groups", "8 groups"),
    ],
)
def test_steps_over_pixels_and_channels_that_are_padded(layer: nn.Conv2d, side: int, dtype: torch.dtype) -> None:
    for measured, counted in convolved(layer.to(dtype), torch.randn(4, layer.in_channels, side, side, dtype=dtype)):
        assert 0.95 * measured - 2**17 < counted < 1.5 * measured + 2**17


@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("layer", "shape", "measured"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), (8, 64, 16, 16), (524288, 800408, 229400, 349848)),
        (nn.Conv2d(256, 512, 1), (8, 256, 16, 16), (4194304, 4100760, 282648, 955032)),
        (nn.Conv2d(96, 192, 2, stride=2), (4, 96, 56, 56), (3809304, 4777624, 1548312, 1312408)),
        (nn.Conv2d(3, 384, 16, stride=16), (4, 3, 224, 224), (8044576, 17590424, 7430176, 16373912)),
        (nn.Conv2d(64, 64, 3, padding=1, groups=8), (8, 64, 16, 16), (524288, 889496, 164888, 374424)),
    ],
    ids=["dense", "one pixel", "patches", "patches of colors", "groups"],
)
def test_bfloat16_convolutions_with_amx_take_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Conv2d, shape: tuple[int, ...], measured: tuple[int, ...], is_last: bool
) -> None:
    """Measured as above, torch 2.13, on a Xeon with AMX: forward and backward, contiguous and with channels last."""
    monkeypatch.setattr(kernel_memory, "_has_amx", lambda: True)
    images = torch.empty(shape, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last) if is_last else images
    weight, outputs = layer.weight.detach().bfloat16(), layer.float()(images.float()).detach().bfloat16()
    rest = (list(layer.stride), list(layer.padding), [1, 1], False, [0, 0], layer.groups)
    forward = convolution_scratch((images, weight, None, *rest), outputs)
    backward = convolution_scratch((outputs, images, weight, None, *rest), (images, weight, None))
    most = 2.7 if is_last else 1.5
    for counted, taken in zip((forward, backward), measured[2 * is_last :], strict=False):
        assert 0.95 * taken < counted < most * taken


@pytest.mark.parametrize(
    ("has", "flag", "words"),
    [
        ("_has_amx", "amx_tile", {"ALL": True, "AVX512_CORE_AMX": True, "avx512_core_bf16": False}),
        ("_has_bfloat16", "avx512_bf16", {"ALL": True, "AVX512_CORE_BF16": True, "avx512_core": False}),
    ],
    ids=["amx", "bfloat16"],
)
def test_instructions_are_used_unless_one_dnn_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, has: str, flag: str, words: dict[str, bool]
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True}, raising=False)
    is_used = getattr(kernel_memory, has).__wrapped__
    for word, expected in words.items():
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", word)
        assert is_used() is expected
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert is_used() is True
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: False}, raising=False)
    assert is_used() is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_gradient", [torch.contiguous_format, torch.channels_last])
def test_results_and_layouts_of_batch_norm(
    of_gradient: torch.memory_format, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    images = torch.randn(4, 64, 32, 32, dtype=dtype).to(memory_format=memory_format)
    ones = torch.ones(64)
    _, mean, inverse = aten.native_batch_norm(images, ones, ones, None, None, True, 0.1, 1e-5)
    gradient = torch.randn_like(images).to(memory_format=of_gradient)
    args = gradient, images, ones, None, None, mean, inverse, True, 1e-5, [True] * 3
    measured, result = beside_outputs(lambda: aten.native_batch_norm_backward(*args))
    counted = SCRATCH[aten.native_batch_norm_backward.default](args, result)
    assert abs(measured - counted) < 2**14


@pytest.mark.parametrize("dims", [(2, 3), (3, 2)], ids=["contiguous", "transposed"])
def test_copies_of_what_is_not_contiguous(dims: tuple[int, int]) -> None:
    values, ones = torch.randn(8, 4, 64, 64).transpose(2, dims[0]), torch.ones(64)
    forward = values, [64], ones, ones, 1e-5
    measured, (outputs, mean, inverse) = beside_outputs(lambda: aten.native_layer_norm(*forward))
    assert abs(measured - SCRATCH[aten.native_layer_norm.default](forward, outputs)) < 2**14
    backward = values, values, [64], mean, inverse, ones, ones, [True] * 3
    measured, gradients = beside_outputs(lambda: aten.native_layer_norm_backward(*backward))
    assert abs(measured - SCRATCH[aten.native_layer_norm_backward.default](backward, gradients)) < 2**14
    for shifts in ([1], [1, 2]):
        rolled = values, shifts, [1, 2][: len(shifts)]
        measured, result = beside_outputs(lambda rolled=rolled: aten.roll(*rolled))
        assert abs(measured - SCRATCH[aten.roll.default](rolled, result)) < 2**14


@pytest.mark.skipif(not HAS_WIDE_KERNELS, reason="oneDNN's kernels for other processors take other layouts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [160, 256])
def test_gates_and_weights_of_an_lstm(width: int, dtype: torch.dtype) -> None:
    inputs, state = torch.randn(20, 8, width, dtype=dtype), torch.zeros(1, 8, width, dtype=dtype)
    weights = [torch.randn(4 * width, *shape, dtype=dtype) for shape in ((width,), (width,), (), ())]
    forward = (inputs, *weights, state, state, False, [], 2, width, 1, True, False, False, True)
    measured, result = beside_outputs(lambda: aten.mkldnn_rnn_layer(*forward))
    assert 0.95 * measured - 2**17 < lstm_scratch(forward, result) < 1.5 * measured
    outputs, *states, workspace = result
    gradients = [torch.randn_like(tensor) for tensor in (outputs, *states)]
    backward = (
        *(inputs, *weights, state, state, outputs, *states, *gradients),
        *(False, 2, width, 1, True, True, False, [], False, workspace),
    )
    measured, result = beside_outputs(lambda: aten.mkldnn_rnn_layer_backward(*backward))
    assert 0.95 * measured - 2**17 < lstm_scratch(backward, result) < 1.5 * measured


_KEPT = """
import ctypes
import torch
from vissl_zero.planner.kernel_memory import compiled_kernel

class Facts(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Facts
in_use = lambda: libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd

def run(width):
    tensors = torch.ones(24, width, dtype=torch.bfloat16), torch.ones(width, 48, dtype=torch.bfloat16)
    torch.mm(*tensors)
    products.append((torch.ops.aten.mm.default, tensors))
    tensors = torch.ones(2, width, 12, 12, dtype=torch.bfloat16), torch.ones(32, width, 3, 3, dtype=torch.bfloat16)
    args = *tensors, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    torch.ops.aten.convolution(*args)
    convolutions.append((torch.ops.aten.convolution.default, args))

products, convolutions = [], []
run(16)
products, convolutions = [], []
before = in_use()
for width in range(20, 60, 4):
    run(width)
taken = in_use() - before
inputs = sum(tensor.nbytes for _, args in products + convolutions for tensor in args[:2])
for width in range(20, 60, 4):
    run(width)
again = in_use() - before - taken
print(taken - inputs, again - inputs, sum(compiled_kernel(*one)[1] for one in products[:10] + convolutions[:10]))
print(len({compiled_kernel(*one)[0] for one in products + convolutions}))
"""


@pytest.mark.skipif(not kernel_memory._has_bfloat16(), reason="oneDNN compiles fewer kernels for other processors")
def test_compiled_kernels_of_bfloat16_keep_what_is_counted_once() -> None:
    printed = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True, timeout=120)
    taken, again, counted, num_kernels = map(int, printed.stdout.split())
    assert 0.9 * taken < counted < 1.4 * taken
    assert again < 0.02 * taken
    assert num_kernels == 20


def test_kernels_are_told_apart_by_shapes_layouts_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_memory, "_has_bfloat16", lambda: True)
    half = partial(torch.empty, dtype=torch.bfloat16)
    products = [
        (half(8, 4), half(4, 6)),
        (half(8, 5), half(5, 6)),
        (half(4, 8).t(), half(4, 6)),
        (half(8, 4), half(4, 6)),
    ]
    assert len({compiled_kernel(aten.mm.default, args) for args in products}) == 3
    images, weight = half(1, 4, 9, 9), half(4, 4, 3, 3)
    steps = [(images, weight, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1) for stride in (1, 2)]
    assert len({compiled_kernel(aten.convolution.default, args) for args in steps}) == 2
    assert compiled_kernel(aten.add.Tensor, products[0]) is None
    assert compiled_kernel(aten.mm.default, (torch.empty(8, 4), torch.empty(4, 6))) is None
    monkeypatch.setattr(kernel_memory, "_has_bfloat16", lambda: False)
    assert compiled_kernel(aten.mm.default, products[0]) is None


def test_a_batch_without_images_takes_nothing_for_them() -> None:
    """A pass may have no images of a size."""
    layer, images = nn.Conv2d(3, 32, 4, stride=4), torch.zeros(0, 3, 16, 16)
    outputs = layer(images)
    backward = outputs, images, layer.weight, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    assert convolution_scratch(backward, (images, layer.weight, None)) <= 16 * layer.weight.nbytes
