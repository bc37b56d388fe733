"""Outputs leave a model in float32 at least, whatever they are nested in."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.models.keyed_random import element_bits
from vissl_zero.resolve.resolved import Precision
from vissl_zero.sharding.model.precision import (
    cast_tensors,
    cast_to_master,
    computed_in,
    run_in_precision,
    stochastically_rounded,
    widened,
)
from vissl_zero.sharding.model.wrap_plan import PlannedUnit


class _Output(NamedTuple):
    scores: list[Tensor]
    probe: Tensor | None


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        self.seen = y.dtype
        return [_Output([y], None), {"y": y}]


def test_inputs_are_cast_and_what_counts_or_names_is_not() -> None:
    index, mask, half = torch.ones(1).long(), torch.ones(1).bool(), torch.ones(1).half()
    (first, kept), named = cast_tensors(([torch.ones(1), index], {"x": half, "m": mask, "n": 3}), torch.float64)
    assert first.dtype == named["x"].dtype == torch.float64
    assert kept is index and named["m"] is mask and named["n"] == 3


def test_half_becomes_float32_and_the_rest_stays() -> None:
    half, double, index = torch.ones(1, dtype=torch.bfloat16), torch.ones(1).double(), torch.ones(1).long()
    output, (first, second), kept = widened([_Output([half], None), (double, index), {"x": half}])
    assert isinstance(output, _Output) and output.probe is None
    assert output.scores[0].dtype == kept["x"].dtype == torch.float32
    assert (first.dtype, second.dtype) == (torch.float64, torch.int64)


@dataclass
class _Made:
    """Outputs of which one is not for the constructor."""

    scores: Tensor
    name: str = "x"
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.scores


def test_fields_of_dataclasses_become_float32_and_classes_stay() -> None:
    made = widened(_Made(torch.ones(1, dtype=torch.float16), "y"))
    assert (made.scores.dtype, made.doubled.dtype, made.name) == (torch.float32, torch.float32, "y")
    assert widened(_Made) is _Made


def test_autocast_is_on_inside_and_off_outside() -> None:
    model = _Model()
    run_in_precision(model, Precision(autocast="bfloat16"), torch.device("cpu"))
    output, mapping = model(torch.randn(3, 2))
    assert model.seen == torch.bfloat16
    assert output.scores[0].dtype == mapping["y"].dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(2, 2))
        self.register_buffer("order", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.mask


def test_an_error_of_mixed_formats_names_the_buffers() -> None:
    model = _Masked()
    model.linear.bfloat16()
    run_in_precision(model, Precision(compute="bfloat16"), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(1, 2, dtype=torch.bfloat16))
    (note,) = caught.value.__notes__
    assert "(buffers: mask)" in note and "level 0" in note
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        model(torch.ones(1, 3, dtype=torch.bfloat16))
    assert not hasattr(caught.value, "__notes__")


def test_double_goes_through_untouched() -> None:
    model = _Model().double()
    run_in_precision(model, Precision(master="float64"), torch.device("cpu"))
    assert model(torch.randn(3, 2).double())[1]["y"].dtype == torch.float64


def test_stochastic_rounding_takes_a_neighbor_and_is_right_on_average() -> None:
    exact = torch.tensor([1.0, -2.5, 0.0, float("inf"), float("-inf")])
    bits = torch.full((5,), 65535)
    assert torch.equal(stochastically_rounded(exact, bits), exact.bfloat16())
    assert stochastically_rounded(torch.tensor([float("nan")]), bits[:1]).isnan().all()
    for value in (1.001, -3.1417, 1e-39, -7e4):
        wide = torch.full((2**16,), value)
        drawn = stochastically_rounded(wide, element_bits(1, 0, len(wide), wide.device)).float()
        below, above = drawn.min(), drawn.max()
        assert below <= wide[0] <= above
        assert set(drawn.tolist()) == {float(below), float(above)}
        # Neighbors: nothing lies between them.
        assert torch.nextafter(below.bfloat16(), above.bfloat16()) == above.bfloat16()
        assert abs(drawn.double().mean() - wide[0]) < 4 * (above - below) * 0.5 / 2**8


def test_the_bits_of_an_element_do_not_depend_on_the_cut() -> None:
    whole = element_bits(7, 0, 1000, torch.device("cpu"))
    cuts = [0, 1, 13, 640, 1000]
    parts = [element_bits(7, a, b - a, torch.device("cpu")) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole.tolist())) == 1000 and not torch.equal(whole, element_bits(8, 0, 1000, torch.device("cpu")))
    assert (whole >= 0).all() and (whole < 2**53).all()


def test_batch_norm_alone_stays_wide_under_parameters_in_bfloat16() -> None:
    def formats(precision: Precision) -> list[torch.dtype]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
        assert cast_to_master(model, precision) is model
        return [layer.weight.dtype for layer in model] + [model[1].running_mean.dtype]

    narrow, wide = torch.bfloat16, torch.float32
    assert formats(Precision("bfloat16", None, "bfloat16", "float32", rounding="kahan")) == [narrow, wide, narrow, wide]
    assert formats(Precision("float64", None, "float64", "float64")) == [torch.float64] * 4


def test_a_forecast_computes_in_the_format_and_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model.scale = nn.Parameter(torch.tensor(2.0))
    before, seen = dict(model.named_parameters(remove_duplicate=False)), []
    units = [
        PlannedUnit(("0",), "block", 6),
        PlannedUnit(("1",), "norm", 4, is_float32=True),
        PlannedUnit(("", "2", "absent"), "root", 7),
    ]
    narrow = torch.bfloat16
    with computed_in(model, narrow, units):
        handle = model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
        formats = {name: param.dtype for name, param in model.named_parameters(remove_duplicate=False)}
        assert model[0].weight is model[2].weight, "tied ones once"
        assert model(torch.ones(2, 2)).dtype == narrow
        handle.remove()
    assert formats == {name: torch.float32 if name.startswith(("1.", "scale")) else narrow for name in before}
    assert seen == [narrow]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param for name, param in before.items())
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_a_forward_pass_that_was_set_on_the_model_runs_inside_and_a_copy_runs_its_own() -> None:
    model = _Model()
    model.forward = lambda x: model.layer(x) + 1.0
    run_in_precision(model, Precision(autocast="bfloat16"), torch.device("cpu"))
    x = torch.ones(1, 2)
    assert model(x).dtype == torch.float32 and not torch.equal(model(x), model.layer(x))
    plain = _Model()
    run_in_precision(plain, Precision(autocast="bfloat16"), torch.device("cpu"))
    copied = copy.deepcopy(plain)
    copied(x)
    assert (plain.seen, copied.seen) == (None, torch.bfloat16)
