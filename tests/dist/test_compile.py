"""TRAINER.COMPILE: compiled units train what plain torch trains, at every level; what cannot be compiled is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import vissl_zero
from tests.dist.case import Case, Outcome, build, forward, loss_of, micro_batches
from tests.dist.plain import train_plainly
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.sharding.model.compilation import compile_units
from vissl_zero.sharding.model.wrap_plan import model_units

TOLERANCE = 1e-10
# Two resolutions in each step. At level 3 checks listen to three forward passes of each unit.
SMALL = Case(optimizer="adamw", lr=0.01, num_steps=4, is_shallow=True, norm="none")


def _num_graphs() -> int:
    """Functions that torch.compile has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["ok"])


def _compiled(case: Case, levels: tuple[int, ...], backend: str, plan: dict[str, Any]) -> list[tuple[int, Outcome]]:
    """For each level, the number of graphs that were made, and what was trained."""
    outcomes = []
    for level in levels:
        torch._dynamo.reset()  # nothing that an earlier level has compiled
        before = _num_graphs()
        outcome = train_sharded(case, level, {"compile": backend, **plan})
        outcomes.append((_num_graphs() - before, outcome))
    return outcomes


def _require_equal(case: Case, world_size: int, levels: tuple[int, ...], backend: str, **plan: Any) -> None:
    outcomes = run_on_ranks(world_size, _compiled, case, levels, backend, plan, timeout_s=280)[0]
    reference = train_plainly(case, num_ranks=1)
    for level, (num_graphs, outcome) in zip(levels, outcomes, strict=True):
        distance = outcome.distance(reference)
        print(f"level {level}: {num_graphs} graphs, {distance}")
        assert num_graphs > 0, level
        assert max(distance.values()) < TOLERANCE, (level, distance)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_compiled_units_train_what_plain_torch_trains() -> None:
    """Traced and differentiated by torch.compile, without code made of it: that is the slow test's."""
    _require_equal(SMALL, 2, (3,), "aot_eager", checkpoint_every=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("trunk", "dropout", "every", "levels"),
    [("conv", 0.2, 0, (0, 1, 2, 3)), ("conv", 0.2, 1, (0, 1, 2, 3)), ("vit", 0.0, 1, (3,))],
)
def test_compiled_code_trains_what_plain_torch_trains(
    trunk: str, dropout: float, every: int, levels: tuple[int, ...]
) -> None:
    """Convolutions with batch norm over ranks and dropout, which stay out of graphs; a vision transformer."""
    case = Case(optimizer="adamw", lr=0.01, num_steps=5, dropout=dropout, trunk=trunk, num_micro_batches=2 - every)
    _require_equal(case, 2, levels, "inductor", checkpoint_every=every)


def test_a_unit_that_cannot_be_compiled_is_named_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(is_shallow=True)
    losses = []
    for backend in (None, "no_such_backend"):
        torch.manual_seed(0)
        model = build(case)
        if backend is not None:
            compile_units(model, model_units(model), backend)
        batch = next(iter(micro_batches(case, 0)))
        set_random_key(0, 0, torch.arange(batch[0].shape[1]))
        with caplog.at_level(logging.WARNING):
            loss = loss_of(forward(model, case, list(batch)), batch[0].shape[1])
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    named = {record.getMessage().split()[1] for record in caplog.records if "runs eagerly" in record.getMessage()}
    assert named == {"trunk.stem", "trunk.blocks.0", "trunk.blocks.1", "heads.0"}
    assert any(record.getMessage().startswith("Compiling 4 units") for record in caplog.records)
    assert any(record.getMessage().startswith("Compiled 4 of 4 units") for record in caplog.records)


def _own_loop(is_compiled: bool) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    before = _num_graphs()
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": 3, "compile": is_compiled})
    losses = []
    for _ in range(6):
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _num_graphs() - before


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_initialize_compiles() -> None:
    (plain, none), (compiled, some) = (run_on_ranks(2, _own_loop, flag, timeout_s=100)[0] for flag in (False, True))
    assert none == 0 < some
    assert compiled == pytest.approx(plain, abs=1e-12)
