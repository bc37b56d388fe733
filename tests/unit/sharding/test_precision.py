"""Outputs leave a model in float32 at least, whatever they are nested in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vissl_zero.config.resolved import Precision
from vissl_zero.sharding.precision import run_in_precision, widened


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


def test_half_becomes_float32_and_the_rest_stays() -> None:
    half, double, index = torch.ones(1, dtype=torch.bfloat16), torch.ones(1).double(), torch.ones(1).long()
    output, (first, second), kept = widened([_Output([half], None), (double, index), {"x": half}])
    assert isinstance(output, _Output) and output.probe is None
    assert output.scores[0].dtype == kept["x"].dtype == torch.float32
    assert (first.dtype, second.dtype) == (torch.float64, torch.int64)


def test_autocast_is_on_inside_and_off_outside() -> None:
    model = _Model()
    run_in_precision(model, Precision(autocast="bfloat16"), torch.device("cpu"))
    output, mapping = model(torch.randn(3, 2))
    assert model.seen == torch.bfloat16
    assert output.scores[0].dtype == mapping["y"].dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]


def test_double_goes_through_untouched() -> None:
    model = _Model().double()
    run_in_precision(model, Precision(master="float64"), torch.device("cpu"))
    assert model(torch.randn(3, 2).double())[1]["y"].dtype == torch.float64
