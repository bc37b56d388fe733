"""Rounding to float8 against the formats written out, the layer's products, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.float8_by_hand import as_sent_by_hand, multiply_by_hand, representable, rounded, rounded_in_blocks
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolved import Float8Plan, ShardingPlan
from vissl_zero.sharding.engines.torch.unit_transfers import Packing, gather_packed
from vissl_zero.sharding.model import float8
from vissl_zero.sharding.model.float8 import (
    Blocks,
    Float8Linear,
    MxLinear,
    as_sent,
    packed,
    product,
    quantize,
    quantize_layers,
    require_float8,
    sent_weights,
)
from vissl_zero.sharding.strategy import Strategy

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [(E4M3, 4, 3), (E5M2, 5, 2)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "exponent_bits", "mantissa_bits"), FORMATS)
def test_what_float8_can_say_stays_as_it_is(dtype: torch.dtype, exponent_bits: int, mantissa_bits: int) -> None:
    table = representable(exponent_bits, mantissa_bits)
    assert table[-1] == torch.finfo(dtype).max and len(table) == (127 if dtype == E4M3 else 124)
    for power in (-3, 0, 5):  # of the scale
        row = torch.cat([table, -table])[None] * 2.0**power
        assert torch.equal(quantize(row, dtype).dequantize(torch.float64), row)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "exponent_bits", "mantissa_bits"), FORMATS)
def test_rounding_is_the_formats(dtype: torch.dtype, exponent_bits: int, mantissa_bits: int, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(20, 50, dtype=torch.float64) * torch.logspace(-3, 3, 20, dtype=torch.float64)[:, None]).to(
        wide
    )
    rows = quantize(matrix, dtype)
    values, scales = rounded(matrix, exponent_bits, mantissa_bits)
    assert rows.scales.dtype == (torch.float64 if wide == torch.float64 else torch.float32)
    torch.testing.assert_close(rows.scales.double(), scales, rtol=1e-6, atol=0)
    # Dividing in float32 moves a number that lies in the middle to either side.
    is_same = rows.values.double() == values
    assert is_same.all() if wide == torch.float64 else is_same.double().mean() > 0.99
    error = (rows.dequantize(torch.float64) - matrix.double()).abs()
    smallest = representable(exponent_bits, mantissa_bits)[1] * scales
    bound = matrix.double().abs() * 2.0 ** -(mantissa_bits + 1) + smallest / 2
    assert (error <= bound * (1 + 1e-5)).all()


def test_zeros_and_tiny_rows() -> None:
    matrix = torch.tensor([[0.0, -0.0], [1e-44, 0.0], [1e-30, -2e-30], [1.0, 2.0]])
    rows = quantize(matrix, E4M3)
    assert rows.values.float().isfinite().all()
    torch.testing.assert_close(rows.dequantize(torch.float32), matrix, rtol=2**-4, atol=1e-40)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_nan_and_no_other_is(bad: float) -> None:
    a, b = torch.ones(3, 4), torch.ones(5, 4)
    a[1, 2] = bad
    result = product(quantize(a, E5M2), quantize(b, E4M3), torch.float32)
    assert result[1].isnan().all()
    torch.testing.assert_close(result[[0, 2]], torch.full((2, 5), 4.0))
    layer = Float8Linear(4, 5)
    layer(a).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.isnan().any()  # by which a loss scaler skips the step


def test_a_block_has_the_least_power_of_two_that_cuts_nothing_off() -> None:
    """By hand: 448 is the largest e4m3, and 2**-9 is code 127 - 9 of e8m0. Zeros may have any scale."""
    matrix = torch.zeros(1, 4 * 32 + 5)
    matrix[0, [3, 40, 70, 130]] = torch.tensor([448.0, -449.0, 1.0, 896.0 * 2**-9])
    blocks = Blocks.of(matrix, is_gradient=False)
    assert blocks.scales.float().tolist() == [[1.0, 2.0, 2.0**-8, 2.0**-9, 2.0**-8]]
    assert blocks.scales.view(torch.uint8).tolist() == [[127, 128, 119, 118, 119]]
    assert blocks.values[0, [3, 40, 70, 130]].tolist() == [448.0, -224.0, 256.0, 448.0]  # 224.5 is not an e4m3
    assert blocks.dequantize(torch.float32)[0, [3, 40, 70, 130]].tolist() == [448.0, -448.0, 1.0, 1.75]


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 96, 100])
def test_blocks_are_rounded_as_written_out(wide: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(20, width).double() * torch.logspace(-20, 20, 20, dtype=torch.float64)[:, None]).to(wide)
    matrix[3] = 0
    blocks = Blocks.of(matrix, is_gradient=False)
    values, scales = rounded_in_blocks(matrix)
    # Dividing by a power of two is exact, in any format.
    assert torch.equal(blocks.values.double(), values)
    assert blocks.scales.shape == (20, math.ceil(width / 32))
    assert torch.equal(blocks.dequantize(torch.float64), values * scales)
    error, bound = (values * scales - matrix.double()).abs(), matrix.double().abs() * 2.0**-4
    assert (error <= torch.maximum(bound, scales * 2.0**-10)).all()


WIDE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Above 224 and up to 232, which is a tie, the largest is rounded to 224: then the scale is half of what it was.
LARGEST = [223.0, 224.0, 225.0, 231.0, 232.0, 233.0, 447.0, 448.0, 449.0, 463.0, 464.0, 465.0]


def _weights(dtype: torch.dtype) -> Tensor:
    """Rows of all sizes, of zeros, of numbers that only just exist, and around the scales' steps."""
    torch.manual_seed(0)
    limits = torch.finfo(dtype)
    random = torch.randn(2000, 37).double() * 2.0 ** torch.randint(-30, 11, (2000, 1))
    zeros = torch.tensor([0.0, -0.0]).double()[:, None].expand(2, 37)
    tiny = torch.randint(-300, 300, (300, 37)).double() * limits.smallest_normal * limits.eps
    steps = torch.rand(len(LARGEST), 37).double() * 200
    steps[:, 5] = torch.tensor(LARGEST)
    return torch.cat([random, zeros, tiny, steps, -steps / 2**9]).to(dtype)


@pytest.mark.parametrize("dtype", WIDE)
def test_a_weight_that_was_sent_is_rounded_to_itself(dtype: torch.dtype) -> None:
    weight = _weights(dtype)
    once = as_sent(weight)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(as_sent(once).view(bits), once.view(bits)), "bit for bit, the sign of zeros too"
    assert torch.equal(as_sent(once[7:60]), once[7:60]) and torch.equal(as_sent(weight[7:60]), once[7:60])
    assert once.isfinite().all() and (once != weight).double().mean() > 0.5
    # Scales end at 2**-126: the rows of numbers that only just exist in float64 become zeros, also by hand.
    assert torch.equal(once.double(), as_sent_by_hand(weight))
    rows = packed(weight)
    assert torch.equal(rows.scales.to(torch.float8_e8m0fnu).float(), rows.scales), "a byte is enough"
    assert (rows.values.shape, rows.scales.shape) == (weight.shape, (len(weight), 1))
    error, bound = (once - weight).double().abs(), weight.double().abs() * 2.0**-4
    assert (error <= torch.maximum(bound, rows.scales.double() * 2.0**-10)).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_of_a_weight_that_is_not_finite_is_sent_as_nan_and_no_other_is(bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    assert as_sent(weight).isnan().sum(dim=1).tolist() == [0, 4, 0]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_message_brings_weights_rounded_and_the_rest_as_it_is(rank: int, dtype: torch.dtype) -> None:
    shapes = [torch.Size(shape) for shape in ((5, 7), (3,), (2, 3, 2), (4, 33), (1,))]
    is_float8, sizes = [True, False, False, True, False], [shape.numel() for shape in shapes]
    packing, num_elements = Packing(shapes, is_float8), sum(sizes)
    torch.manual_seed(0)
    parts = torch.randn(3, num_elements).to(dtype)
    num_bytes = packing.num_bytes(dtype.itemsize)
    least = (5 * 7 + 5) + (4 * 33 + 4) + (3 + 12 + 1) * dtype.itemsize
    assert num_bytes % 16 == 0 and least <= num_bytes < least + 16
    output = torch.full_like(parts, math.nan)
    output[rank] = parts[rank]

    def gather(everything: Tensor, mine: Tensor) -> None:
        assert everything[rank * num_bytes :].data_ptr() == mine.data_ptr()
        for other in {0, 1, 2} - {rank}:
            packing.pack(parts[other], everything.view(3, -1)[other])

    gather_packed(packing, output.flatten(), torch.empty(3, num_bytes, dtype=torch.uint8), rank, gather)
    for other, (found, part) in enumerate(zip(output, parts, strict=True)):
        for got, sent, shape, is_sent in zip(found.split(sizes), part.split(sizes), shapes, is_float8, strict=True):
            is_rounded = is_sent and other != rank
            assert torch.equal(got, as_sent(sent.view(shape)).flatten() if is_rounded else sent)


def test_weights_of_one_float8_layer_alone_are_sent_so() -> None:
    model = _model()
    model.tied, model.again = nn.Linear(2, 2), model.blocks[0]["fc1"]
    model.tied.weight = model.blocks[1]["fc1"].weight
    quantize_layers(model, Float8Plan("fc1|tied|head"))
    assert sent_weights(model) == set()
    quantize_layers(model, Float8Plan("fc1|tied|head", gather=True))
    assert sent_weights(model) == {model.blocks[0]["fc1"].weight, model.head.weight}


def test_three_times_a_gradient_is_rounded_to_three_times_the_numbers() -> None:
    """Or 3 ranks, each with a mean over a third of the samples, would train otherwise than one process."""
    torch.manual_seed(0)
    matrix = torch.randn(50, 100, dtype=torch.float64)
    one, three = (Blocks.of(matrix * factor, is_gradient=True).dequantize(torch.float64) for factor in (1, 3))
    torch.testing.assert_close(three, 3 * one, rtol=1e-14, atol=0)
    one, three = (Blocks.of(matrix * factor, is_gradient=False).dequantize(torch.float64) for factor in (1, 3))
    assert ((three - 3 * one).abs() > 1e-3).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
def test_a_block_that_is_not_finite_is_nan_and_no_other_is(bad: float) -> None:
    a, b = torch.ones(3, 40, dtype=torch.float64), torch.ones(5, 40, dtype=torch.float64)
    a[1, 35] = bad
    blocks = Blocks.of(a, is_gradient=False)
    assert blocks.dequantize(torch.float64).isnan().sum(dim=1).tolist() == [0, 8, 0]
    result = blocks.matmul_t(Blocks.of(b, is_gradient=False), torch.float64)
    assert result[1].isnan().all() and (result[[0, 2]] == 40).all()
    gradient = Blocks.of(a, is_gradient=True).dequantize(torch.float64)  # a large number alone is fine over its own row
    assert gradient.isnan().all(dim=1).tolist() == [False, bad != 1e300, False]


def test_scales_go_to_the_kernel_in_tiles() -> None:
    """Row r and column c of a tile of 128 x 4 at 16 * (r % 32) + 4 * (r // 32) + c, as cuBLAS documents it."""
    torch.manual_seed(0)
    codes = torch.randint(1, 255, (300, 6), dtype=torch.uint8)
    found = float8._in_tiles(codes.view(torch.float8_e8m0fnu)).view(torch.uint8).view(3, 2, 512)
    expected = torch.zeros_like(found)
    for r in range(300):
        for c in range(6):
            expected[r // 128, c // 4, 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = codes[r, c]
    assert torch.equal(found, expected)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output, *(tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None)]


@pytest.mark.parametrize(
    "plan", [Float8Plan(".", scales, gather) for scales in ("rows", "mx") for gather in (False, True)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(41,), (4, 41), (2, 3, 41), (0, 41)])
def test_a_layer_is_the_one_written_out(shape: tuple[int, ...], bias: bool, plan: Float8Plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(41, 64, bias=bias), nn.Tanh(), nn.Linear(64, 2, bias=bias)).double()
    by_hand, x = copy.deepcopy(model), torch.randn(shape, dtype=torch.float64)
    quantize_layers(model, plan)
    if len(shape) > 1:
        multiply_by_hand(by_hand, plan)
        for ours, theirs in zip(_gradients(model, x), _gradients(by_hand, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    else:
        torch.testing.assert_close(model(x), model(x[None])[0])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in by_hand.named_parameters()]


@pytest.mark.parametrize("kind", [Float8Linear, MxLinear])
def test_formats_of_outputs_and_gradients(kind: type[Float8Linear]) -> None:
    layer = kind(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        output.float().sum().backward()  # a backward pass inside autocast is as outside
    assert output.dtype == torch.bfloat16 and x.grad is not None and layer.weight.grad is not None
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.equal(output, layer(x).bfloat16()) or (output.float() - layer(x)).abs().max() < 0.05


@pytest.mark.parametrize(("kind", "bytes_of_scales"), [(Float8Linear, 50 * 4), (MxLinear, 50 * 3)])
def test_an_input_is_kept_in_float8_and_not_at_all_under_a_frozen_weight(
    kind: type[Float8Linear], bytes_of_scales: int
) -> None:
    kept: list[Tensor] = []
    layer, x = kind(80, 32), torch.randn(50, 80, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
        assert [tensor.nbytes for tensor in kept] == [50 * 80, bytes_of_scales, layer.weight.nbytes]
        kept.clear()
        layer.requires_grad_(False)(x).sum().backward()
    assert kept[0] is layer.weight and x.grad is not None


class _Own(nn.Linear):
    """A subclass may compute otherwise."""


def _model() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(2, 2), "own": _Own(2, 2)}) for _ in range(2))
    model.head = nn.Linear(2, 2)
    return model


def test_layers_are_chosen_by_name_and_keep_everything_else() -> None:
    model = _model()
    before = dict(model.named_parameters())
    quantize_layers(model, Float8Plan())
    assert not any(isinstance(layer, Float8Linear) for layer in model.modules())
    quantize_layers(model, Float8Plan("fc1|own"))
    names = [name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)]
    assert names == ["blocks.0.fc1", "blocks.1.fc1"]
    assert all(param is before[name] for name, param in model.named_parameters())


def test_a_pattern_that_matches_nothing_is_refused_with_the_names() -> None:
    require_float8(_model(), Float8Plan(), CPU)
    require_float8(_model(), Float8Plan("head"), CPU)
    with pytest.raises(ConfigError) as error:
        require_float8(_model(), Float8Plan("qkv"), CPU)
    assert str(error.value) == (
        "config.MODEL.FLOAT8: must match the name of a linear layer (got 'qkv'). "
        "Linear layers of this model: blocks.*.fc1, head."
    )


def test_a_strategy_refuses_before_it_changes_anything() -> None:
    model = _model()
    plan = ShardingPlan(level=0, float8=Float8Plan("qkv"))
    with pytest.raises(ConfigError, match="Linear layers of this model"):
        _strategy().shard(model, [], lambda groups: (torch.optim.SGD(groups), None), plan, CPU)


def _strategy() -> Strategy:
    from vissl_zero.registry import STRATEGIES

    built: Strategy = STRATEGIES.get("torch").build()
    return built


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError) as error:
        require_float8(_model(), Float8Plan("head"), torch.device("cuda"))
    assert str(error.value) == (
        "config.MODEL.FLOAT8: needs a GPU of compute capability 8.9 or above, which multiplies float8 with scales of "
        "'rows' (got capability 8.0). Turn it off: bfloat16 is what this GPU has."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_float8(_model(), Float8Plan("head"), torch.device("cuda"))
    with pytest.raises(ConfigError) as error:
        require_float8(_model(), Float8Plan("head", "mx"), torch.device("cuda"))
    assert str(error.value) == (
        "config.MODEL.FLOAT8: needs a GPU of compute capability 10.0 or above, which multiplies float8 with scales of "
        "'mx' (got capability 9.0). This GPU has scales of 'rows'."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    require_float8(_model(), Float8Plan("head", "mx"), torch.device("cuda"))
