"""A loop that goes back: ``load`` and ``load_state_dict`` into an optimizer that has state already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.ranks import run_on_ranks

# Muon and Adafactor keep another state of a vector than of a matrix, Adagrad makes its own when it is built.
OPTIMIZERS = ["AdamW", "SGD", "LARC", "Muon", "Adafactor", "Adagrad", "ScheduleFreeAdamW"]


def _net(is_frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)).double()
    net[0].requires_grad_(not is_frozen)
    return net


def _images(number: int) -> Tensor:
    seed = torch.Generator().manual_seed(number + 10 * dist.get_rank())
    return torch.randn(4, 6, generator=seed, dtype=torch.float64)


def _gaps(level: int, is_frozen: bool, folder: str) -> dict[str, float]:
    """How far the losses of two steps are from those of the same steps after going back, by optimizer and way."""
    gaps: dict[str, float] = {}
    for name in OPTIMIZERS:
        net = _net(is_frozen)
        teacher = vissl_zero.ema(net, decay=0.9)
        model, optimizer = vissl_zero.initialize(net, {"type": name, "lr": 0.01}, {"level": level})

        def step(
            number: int, model: nn.Module = model, teacher: nn.Module = teacher, optimizer: Any = optimizer
        ) -> float:
            images = _images(number)
            with torch.no_grad():
                wanted = teacher(images)
            loss = model(images).square().mean() + (model(images) - wanted).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        for number in range(2):
            step(number)
        optimizer.save(f"{folder}/{name}")
        state = copy.deepcopy(optimizer.state_dict())
        wanted = [step(number) for number in (2, 3)]
        ways: dict[str, Callable[[], object]] = {
            "load": lambda optimizer=optimizer, name=name: optimizer.load(f"{folder}/{name}"),
            "load_state_dict": lambda optimizer=optimizer, state=state: optimizer.load_state_dict(state),
        }
        for way, go_back in ways.items():
            go_back()
            losses = [step(number) for number in (2, 3)]
            gaps[f"{name} {way}"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return gaps


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_steps_are_the_same_after_going_back(level, is_frozen, tmp_path):
    for gaps in run_on_ranks(2, _gaps, level, is_frozen, str(tmp_path), timeout_s=100):
        assert len(gaps) == 2 * len(OPTIMIZERS)
        assert max(gaps.values()) < 1e-12, gaps
