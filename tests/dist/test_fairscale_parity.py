"""fairscale on 1 to 4 ranks trains what plain torch trains in one process.

Levels 1 and 2 to 1e-10 in float64. Level 3, whose FSDP takes float32 alone, to 1e-6 in float32, with a stand-in for
CUDA's streams. Cells are a covering array: every case at every level, its settings and worlds dealt in turn.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from tests.dist.cuda_streams import streams_on_cpu
from tests.dist.test_parity import CASES, TOLERANCE
from tests.dist.training import Case, Outcome, train_plainly, train_sharded
from tests.ranks import run_on_ranks

FLOAT32_TOLERANCE = 1e-6
# A tenth of the learning rate: what float32 rounds off grows with it, and is 2e-6 in four steps at the others' rate.
FLOAT32 = {"dtype": "float32", "lr": 0.01}
# Level, and the keys that change how it communicates. 100 elements: some gradients fit into buffers, others do not.
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "2_no_buffer": (2, {"reduce_buffer_size": 0}),
    "2_small_buffer": (2, {"reduce_buffer_size": 100}),
    "3": (3, {}),
    "3_unflattened": (3, {"flatten_parameters": False}),
    "3_buckets": (3, {"flatten_parameters": False, "bucket_cap_mb": 0.001}),
    "3_not_resharded": (3, {"reshard_after_forward": False}),
}
EXCLUDED = {"shard_groups"}  # fairscale shares one copy among all ranks; refused


def _cells() -> list[tuple[str, str, int]]:
    names = [name for name in CASES if name not in EXCLUDED]
    cells = {("everything", settings, 2 + index % 2) for index, settings in enumerate(SETTINGS)}
    cells |= {("everything", settings, world) for settings, world in product(("1", "2", "3"), (1, 4))}
    for index, name in enumerate(names):
        worlds = (2 + index % 2, 3 - index % 2)
        for level, world in ((1, worlds[0]), (2, worlds[1]), (3, worlds[index // 2 % 2])):
            choices = [key for key, (its_level, _) in SETTINGS.items() if its_level == level]
            cells.add((name, choices[index % len(choices)], world))
    return sorted(cells)


@cache
def _reference(case: Case) -> Outcome:
    return train_plainly(case)


def _train(case: Case, level: int, changes: dict[str, Any]) -> Outcome:
    if level < 3:
        return train_sharded(case, level, changes)
    with streams_on_cpu():
        return train_sharded(case, level, changes)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "settings", "world_size"), _cells())
def test_equals_plain_torch(name: str, settings: str, world_size: int) -> None:
    level, changes = SETTINGS[settings]
    case = CASES[name] if level < 3 else replace(CASES[name], **FLOAT32)
    outcome = run_on_ranks(world_size, _train, case, level, {"engine": "fairscale", **changes})[0]
    reference = _reference(case)
    if level < 3:
        distance, tolerance = outcome.distance(reference), TOLERANCE
    else:
        distance, tolerance = _relative_distance(outcome, reference), FLOAT32_TOLERANCE
    print(f"{name} level {settings} world {world_size}: {distance}")
    assert max(distance.values()) < tolerance, distance


def _relative_distance(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Largest difference in losses and tensors, over the largest entry of each where that is above 1."""
    assert outcome.state.keys() == reference.state.keys()
    losses = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(outcome.losses, reference.losses, strict=True)]
    tensors = [_relative(outcome.state[name], whole) for name, whole in reference.state.items()]
    return {"loss": max(losses), "state": max(tensors)}


def _relative(tensor: Tensor, reference: Tensor) -> float:
    scale = max(1.0, float(reference.abs().max()))
    return float((tensor - reference).abs().max()) / scale


def test_every_setting_meets_every_kind_of_case() -> None:
    cells = _cells()
    assert {settings for _, settings, _ in cells} == set(SETTINGS)
    assert {name for name, _, _ in cells} == CASES.keys() - EXCLUDED
    for name in CASES.keys() - EXCLUDED:
        assert {SETTINGS[settings][0] for cell, settings, _ in cells if cell == name} == {1, 2, 3}
