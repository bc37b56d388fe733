"""Levels 1 and 2 of fairscale on 1 to 4 ranks train what plain torch trains in one process, to 1e-10 in float64."""

from __future__ import annotations

import pytest

from tests.dist.test_parity import CASES, TOLERANCE, _reference
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks


def _cells():
    return [(n, w, l, b) for n in CASES if n != "shard_groups" for w in (2, 3) for l, b in ((1, -1), (2, -1), (2, 0))]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "world_size", "level", "buffer"), _cells())
def test_equals_plain_torch(name: str, world_size: int, level: int, buffer: int) -> None:
    outcome = run_on_ranks(
        world_size, train_sharded, CASES[name], level, {"engine": "fairscale", "reduce_buffer_size": buffer}
    )[0]
    distance = outcome.distance(_reference(name))
    print(f"{name} world {world_size} level {level}: {distance}")
    assert max(distance.values()) < TOLERANCE, distance
