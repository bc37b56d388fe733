"""The optimizers of TRAINER.DETERMINISTIC: torch's numbers, and the same bits wherever a tensor is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.optim.elementwise import single_rounded

SIZE = 1003
BUILD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
}


def _train(build: Callable[[Any], torch.optim.Optimizer], cuts: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Five steps on one tensor in pieces that end at ``cuts``."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)
    bounds = list(zip([0, *cuts], [*cuts, SIZE], strict=True))
    params = [nn.Parameter(values[start:stop].clone()) for start, stop in bounds]
    optimizer = build([{"params": params}])
    for _ in range(5):
        grad = torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for param, (start, stop) in zip(params, bounds, strict=True):
            param.grad = grad[start:stop].clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("name", BUILD)
def test_bits_do_not_depend_on_the_cut(name: str) -> None:
    build = lambda groups: single_rounded(BUILD[name](groups))  # noqa: E731
    whole = _train(build, [], torch.float32)
    for cuts in ([1], [7, 8, 500], list(range(13, SIZE, 13)), [SIZE - 1]):
        assert torch.equal(_train(build, cuts, torch.float32), whole), cuts


@pytest.mark.parametrize("name", BUILD)
def test_the_update_is_torchs(name: str) -> None:
    ours = _train(lambda groups: single_rounded(BUILD[name](groups)), [], torch.float64)
    torch.testing.assert_close(ours, _train(BUILD[name], [], torch.float64), rtol=0, atol=1e-14)


def test_another_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"config\.TRAINER\.DETERMINISTIC: .* not with RMSprop"):
        single_rounded(torch.optim.RMSprop([nn.Parameter(torch.zeros(1))]))
