"""Which optimizers may be updated piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import timm.optim
import torch
from torch import Tensor, nn

from vissl_zero.sharding.offload.state_place import _why_not


def _with_state(make: Callable[[Tensor], Any]) -> type[torch.optim.SGD]:
    class Keeping(torch.optim.SGD):
        """Keeps what ``make`` makes of a parameter."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["kept"] = make(param)
            return super().step(closure)

    return Keeping


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (schedulefree.SGDScheduleFree, "other weights to evaluate"),
        (torch.optim.Adagrad, "state when it is built"),
        (_with_state(lambda param: param.detach().half()), "another shape or number format"),
        (_with_state(lambda param: param.detach()[:1]), "another shape or number format"),
        (_with_state(lambda param: "text"), "not numeric"),
        (_with_state(lambda param: [1.0]), "not numeric"),
        (timm.optim.Lamb, "counts its steps in its groups"),
        (_with_state(lambda param: param.detach().clone()), ""),
        (_with_state(lambda param: torch.zeros((), dtype=torch.int64)), ""),  # a number of any format
        (torch.optim.NAdam, ""),
    ],
)
def test_the_reason_why_state_cannot_be_cut(cls: Any, reason: str) -> None:
    found = _why_not(cls([nn.Parameter(torch.zeros(2, 2))], lr=0.1))
    assert reason in found and bool(found) == bool(reason)
