"""The watch sees what goes through each module, and changes nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vissl_zero.engine.module_watch import ModuleWatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.ReLU(inplace=True)
        self.first = nn.Sequential(nn.Linear(2, 2, bias=False), shared)
        self.second = nn.Sequential(nn.Linear(2, 1, bias=False), shared)
        self.unused = nn.Linear(1, 1)
        nn.init.constant_(self.first[0].weight, 3.0)
        nn.init.constant_(self.second[0].weight, -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) - self.second[0](x)


def test_largest_values_by_module_with_gradients_unscaled_and_shared_modules_left_out() -> None:
    model, watch = Net(), ModuleWatch()
    with watch.watching([("", model)]):
        (8.0 * model(torch.tensor([[1.0, -5.0]]))).sum().backward()
    model(torch.tensor([[math.inf, 1.0]]))  # no longer watched
    # 3 - 15 = -12 and relu 0; the second layer gives -0.5 * 0, then -0.5 * (1 - 5) = 2.
    found = [(seen.name, seen.activation, seen.gradient) for seen in watch.over_ranks(loss_scale=8.0)]
    assert found == [("first.0", 12.0, 0.0), ("first", 0.0, 0.0), ("second.0", 2.0, 1.0), ("second", 0.0, 1.0)]


def test_what_is_not_finite_stays_so() -> None:
    model, watch = nn.Sequential(nn.Identity(), nn.Identity()), ModuleWatch()
    with watch.watching([("teacher: ", model)]):
        model(torch.tensor([math.nan, 1.0]))
        model(torch.tensor([2.0, 1.0]))
    (first, _) = watch.over_ranks(1.0)
    assert first.name == "teacher: 0" and math.isnan(first.activation) and not first.is_finite
    assert first.gradient is None
