"""Trunks from timm train at every level, on 1 to 3 ranks, what plain torch trains in one process: float64, 1e-10."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.dist.case import Case, Outcome
from tests.dist.levels import stored
from tests.dist.plain import train_plainly
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks

TOLERANCE, NOISE_FLOOR = 1e-10, 1e-12
# Uneven rows, two resolutions, two micro-batches, clipping; every kind of dropout the trunk has.
COMMON: dict[str, Any] = {
    "norm": "none",
    "batch_sizes": (7, 5),
    "num_micro_batches": 2,
    "num_steps": 2,
    "clip": 0.5,
    "dropout": 0.3,
    "optimizer": "adamw",
    "lr": 0.01,
}
TRUNKS = ("vit", "timm_convnext", "timm_xcit", "timm_swin")


def _case(trunk: str) -> Case:
    return Case(trunk=trunk, **COMMON)


@cache
def _reference(trunk: str) -> Outcome:
    return train_plainly(_case(trunk))


def _at_levels(trunk: str, places: list[tuple[int, int]]) -> list[Outcome]:
    return [train_sharded(_case(trunk), level, {"checkpoint_every": every}) for level, every in places]


# Ranks, and (level, every how many blocks are recomputed; 0: none).
PLACES = {1: [(0, 1), (3, 1)], 2: [(0, 0), (1, 1), (2, 0), (3, 1)], 3: [(0, 1), (1, 0), (2, 1), (3, 0), (3, 2)]}
FEWER = {2: [(2, 1), (3, 0)], 3: [(0, 0), (3, 1)]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trunk", [pytest.param(name, marks=[pytest.mark.slow] * (name != "vit")) for name in TRUNKS])
def test_equals_plain_torch(trunk: str) -> None:
    reference = _reference(trunk)
    noise = max(reference.distance(train_plainly(_case(trunk), reverse_rows=True)).values())
    assert noise < NOISE_FLOOR, "the recipe amplifies rounding; lower its learning rate"
    for world_size, places in (PLACES if trunk == "vit" else FEWER).items():
        outcomes = run_on_ranks(world_size, _at_levels, trunk, places, timeout_s=240)[0]
        for place, outcome in zip(places, outcomes, strict=True):
            distance = outcome.distance(stored(reference, outcome))
            print(f"{trunk} on {world_size} ranks, {place}: {distance}, noise floor {noise:.1e}")
            assert max(distance.values()) < TOLERANCE, (world_size, place, distance)


def test_dropout_changes_what_is_trained() -> None:
    for trunk in TRUNKS:
        plain = train_plainly(Case(trunk=trunk, **{**COMMON, "dropout": 0.0}))
        assert plain.distance(_reference(trunk))["state"] > 1e-6, trunk
