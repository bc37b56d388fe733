"""Levels 0 to 3 on 1 to 4 ranks train the model that plain torch trains in one process, to 1e-10 in float64."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import pytest

from tests.dist.training import Case, Outcome, train_plainly, train_sharded
from tests.ranks import run_on_ranks

TOLERANCE = 1e-10
NOISE_FLOOR = 1e-12

CASES = {
    "sgd": Case(),
    "nesterov": Case(optimizer="nesterov", clip=0.05),
    "larc": Case(optimizer="larc"),
    "larc_clip": Case(optimizer="larc_clip"),
    "lars": Case(optimizer="lars"),
    "adam": Case(optimizer="adam"),
    "adamw": Case(optimizer="adamw", clip=0.05),
    "clip": Case(clip=0.05),
    "accumulation": Case(num_micro_batches=3),
    "checkpointing": Case(checkpoint_every=1),
    "frozen_trunk": Case(frozen_trunk=True),
    "thawed_prototypes": Case(frozen_steps=2),
    "unused_parameter": Case(unused=True),
    "unused_parameter_accumulation": Case(unused=True, num_micro_batches=3),
    "tied_weights": Case(tied=True),
    "giant_tensor": Case(giant=True),
    "uneven_batches": Case(batch_sizes=(11, 7), num_micro_batches=2),
    "group_norm": Case(norm="group"),
    "no_norm": Case(norm="none"),
    "every_layer_wrapped": Case(wrap_threshold=1, checkpoint_every=2),
    "shard_groups": Case(optimizer="larc", clip=0.05, num_micro_batches=2, shard_group_size=2),
    "everything": Case(
        optimizer="larc",
        clip=0.05,
        num_micro_batches=3,
        batch_sizes=(11, 8, 9),
        frozen_steps=1,
        unused=True,
        tied=True,
        checkpoint_every=1,
    ),
}
# Three ranks unless said otherwise: no size divides by it, and the prototypes leave a rank with nothing.
WORLDS = {
    "sgd": (1, 2, 3, 4),
    "everything": (1, 2, 3, 4),
    "larc": (2, 3),
    "accumulation": (2, 3),
    "tied_weights": (2, 3),
    "shard_groups": (4,),
}


@cache
def _reference(name: str) -> Outcome:
    return train_plainly(CASES[name])


@cache
def _noise(name: str) -> float:
    """How far rounding alone carries this recipe: the reference against itself with every batch's rows reversed."""
    return max(_reference(name).distance(train_plainly(CASES[name], reverse_rows=True)).values())


def _cells() -> list[tuple[str, int, int]]:
    return [(name, world, level) for name in CASES for world in WORLDS.get(name, (3,)) for level in range(4)]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "world_size", "level"), _cells())
def test_equals_plain_torch(name: str, world_size: int, level: int) -> None:
    outcome = run_on_ranks(world_size, train_sharded, CASES[name], level)[0]
    distance = outcome.distance(_reference(name))
    print(f"{name} world {world_size} level {level}: {distance}, noise floor {_noise(name):.1e}")
    assert _noise(name) < NOISE_FLOOR, "the recipe amplifies rounding; lower its learning rate"
    assert max(distance.values()) < TOLERANCE, distance


def test_the_cases_differ() -> None:
    """A case that trains what another one trains tests nothing."""
    ends = {name: tuple(_reference(name).losses) for name in CASES}
    same = {"sgd", "checkpointing", "every_layer_wrapped", "unused_parameter"}  # these must not change the numbers
    others = [end for name, end in ends.items() if name not in same - {"sgd"}]
    assert len({*others}) >= len(others) - 1, {name: asdict(CASES[name]) for name in CASES}
