"""TRAINER.DETERMINISTIC: levels 0 to 3 give the same bits in float32, at one number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.training import WHOLE_TENSOR, Case, Outcome, shard, train_step
from tests.ranks import run_on_ranks
from vissl_zero.resolve.resolved import OffloadPlan

SETTINGS = {"dtype": "float32", "num_steps": 4, "lr": 0.02, "is_shallow": True}
CASES = {
    "sgd": Case(optimizer="sgd", **SETTINGS),
    "nesterov": Case(optimizer="nesterov", num_micro_batches=2, batch_sizes=(11, 8, 9), undecayed=True, **SETTINGS),
    "adamw": Case(optimizer="adamw", num_micro_batches=2, tied=True, thin=True, giant=True, **SETTINGS),
    "muon": Case(optimizer="muon", num_micro_batches=2, batch_sizes=(11, 8, 9), tied=True, thin=True, **SETTINGS),
    "lamb": Case(optimizer="lamb", norm="group", **SETTINGS),
    "adamw_8bit": Case(optimizer="adamw_8bit", giant=True, **SETTINGS),
    "adam": Case(optimizer="adam", unused=True, frozen_steps=1, norm="group", dropout=0.2, **SETTINGS),
}


def _outcomes(case: Case, is_deterministic: bool, folder: str = "") -> list[Outcome]:
    """At levels 0 to 3, and, given a folder, at level 3 with all state in it."""
    outcomes = []
    on_disk = OffloadPlan("nvme", nvme_path=folder)
    changes: list[dict[str, Any]] = [{}] * 4 + [{"offload_optimizer": on_disk, "offload_params": on_disk}] * bool(
        folder
    )
    for level, change in zip((0, 1, 2, 3, 3), changes, strict=False):
        sharded, outcome = shard(case, level, deterministic=is_deterministic, **change), Outcome()
        for step in range(case.num_steps):
            train_step(sharded, case, step, outcome)
            sharded.average(0.9)
        outcome.state = sharded.full_state()
        with sharded.averaged():
            outcome.state |= {f"ema:{name}": tensor for name, tensor in sharded.full_state().items()}
        outcomes.append(outcome)
        if change:
            sharded.optimizer.close()  # type: ignore[attr-defined]
    return outcomes


def _num_differing(outcomes: list[Outcome]) -> int:
    """Losses and tensors whose bits are not those of level 0."""
    first, *others = outcomes
    return sum(
        sum(a != b for a, b in zip(first.losses, other.losses, strict=True))
        + sum(not torch.equal(first.state[name], other.state[name]) for name in first.state)
        for other in others
    )


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(
            (name, size)
            for name in ("sgd", "nesterov", "adamw", "adam")
            for size in (2, 4)
            if (name, size) != ("adam", 4)
        ),
        *((name, 3) for name in WHOLE_TENSOR),
    ],
)
def test_levels_give_the_same_bits(name: str, world_size: int, tmp_path: Path) -> None:
    outcomes = run_on_ranks(
        world_size, _outcomes, CASES[name], True, str(tmp_path) if world_size == 2 or name in WHOLE_TENSOR else ""
    )[0]
    assert len(set(outcomes[0].losses)) == CASES[name].num_steps
    assert _num_differing(outcomes) == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_muon_adds_no_difference_to_those_of_gradients() -> None:
    """Of two ranks and one micro-batch there is one order of summation, so gradients agree without the switch too."""
    case = dataclasses.replace(CASES["muon"], num_micro_batches=1)
    assert _num_differing(run_on_ranks(2, _outcomes, case, False)[0]) == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_without_the_switch_they_do_not() -> None:
    """Else the test above would prove nothing."""
    assert _num_differing(run_on_ranks(4, _outcomes, CASES["nesterov"], False)[0]) > 0
