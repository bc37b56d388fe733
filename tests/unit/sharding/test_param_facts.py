"""Bytes of parameters that a level cuts, gathers, sends, and puts on a disk, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan
from vissl_zero.sharding.model.wrap_plan import PlannedUnit, WrapPlan
from vissl_zero.sharding.param_facts import (
    ParamFacts,
    gathered_bytes,
    param_facts,
    params_on_disk,
    share_of,
    whole_units,
)


def _facts(shape: tuple[int, ...], unit: str = "", **more: Any) -> ParamFacts:
    return ParamFacts(shape, 4, unit, True, **{"is_replicated": False, "is_float8": False, **more})


@pytest.mark.parametrize(
    ("shape", "num_ranks", "whole", "part", "in_float8"),
    [
        ((6, 5), 2, 120, 60, 3 * 5 + 3),  # a byte an element, and a scale a row
        ((7, 5), 2, 140, 80, 4 * 5 + 4),  # the last part is filled up
        ((2, 5), 4, 40, 20, 5 + 1),
        ((3,), 2, 12, 8, 2 + 2),
        ((6, 5), 1, 120, 120, 30 + 6),
    ],
)
def test_parts_are_whole_rows(shape: tuple[int, ...], num_ranks: int, whole: int, part: int, in_float8: int) -> None:
    facts = _facts(shape)
    assert (facts.num_bytes, facts.padded(num_ranks)) == (whole, part)
    assert (facts.sent(num_ranks, 1.0), facts.sent(num_ranks, 0.5)) == (part, part / 2)
    assert _facts(shape, is_float8=True).sent(num_ranks, 0.5) == in_float8
    assert whole_units({"w": facts}, num_ranks) == {"": part * num_ranks}


@pytest.mark.parametrize("shape", [(), (6,)])
def test_what_is_replicated_is_not_cut(shape: tuple[int, ...]) -> None:
    facts = _facts(shape, is_replicated=True)
    assert facts.num_bytes == facts.padded(4) == 4 * math.prod(shape)
    assert whole_units({"scale": facts}, 4) == {}


PARAMS = {
    "a.w": _facts((4, 10), "a"),  # 160 bytes
    "a.in.w": _facts((4, 5), "a.in"),  # 80
    "ab.w": _facts((4, 20), "ab"),  # 320: its name only begins as that of a
    "w": _facts((4,), ""),  # 16
    "scale": _facts((), is_replicated=True),
    "norm.w": _facts((9,), "norm", is_replicated=True),
}


@pytest.mark.parametrize(("level", "most"), [(0, 0), (1, 576), (2, 576), (3, 16 + 320)])
def test_a_unit_is_whole_with_those_around_it(level: int, most: int) -> None:
    assert gathered_bytes(PARAMS, ShardingPlan(level), 2) == most
    assert gathered_bytes(PARAMS, ShardingPlan(level, precision=Precision(compute="bfloat16")), 2) == most // 2
    inner = {name: param for name, param in PARAMS.items() if not name.startswith("ab")}
    assert gathered_bytes(inner, ShardingPlan(3), 2) == 16 + 160 + 80
    assert gathered_bytes({}, ShardingPlan(level), 2) == 0


@pytest.mark.parametrize(
    ("most", "on_disk"),
    [
        (None, ["a.w", "a.in.w", "ab.w", "w"]),
        (0, ["a.w", "a.in.w", "ab.w", "w"]),
        (19, ["a.w", "ab.w"]),  # elements of a rank: 20, 10, 40, and 2 of the root, which is last
        (20, ["a.in.w", "ab.w", "w"]),
        (30, ["ab.w", "w"]),
        (32, ["ab.w"]),
        (72, []),
    ],
)
def test_the_first_that_fit_stay_in_memory(most: int | None, on_disk: list[str]) -> None:
    root_first = {"w": PARAMS["w"], **PARAMS}
    tier = OffloadPlan("nvme", nvme_path="/x", max_in_cpu=most)
    assert list(params_on_disk(root_first, ShardingPlan(3, offload_params=tier), 2)) == on_disk
    assert params_on_disk(PARAMS, ShardingPlan(3, offload_params=OffloadPlan("cpu")), 2) == {}


def test_a_format_has_a_share_of_the_masters_bytes() -> None:
    plans = [ShardingPlan(3, precision=Precision(master=master)) for master in ("float32", "float64", "bfloat16")]
    assert [[share_of(dtype, plan) for dtype in ("bfloat16", "float32")] for plan in plans] == [
        [0.5, 1.0],
        [0.25, 0.5],
        [1.0, 2.0],
    ]


def test_a_parameter_is_of_the_innermost_unit_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2), nn.Linear(2, 2).double())
    model.scale = nn.Parameter(torch.tensor(1.0))
    model[1].bias.requires_grad_(False)
    units = (
        PlannedUnit(("0.1",), "norm", 4, is_replicated=True),
        PlannedUnit(("0",), "block", 8),
        PlannedUnit(("1", "2"), "block", 12),
        PlannedUnit(("",), "root", 1),
    )
    names = [name for name, _ in model.named_parameters()]
    facts = param_facts(model, WrapPlan(3, 2, "float32", units), set(names) - {"2.weight"})
    assert list(facts) == names and facts["0.0.weight"].shape == (2, 3)
    assert {name: fact.unit for name, fact in facts.items()} == {
        name: {"0": "0.1" if "0.1." in name else "0", "1": "1", "2": "1"}.get(name[0], "") for name in names
    }
    assert {name for name, fact in facts.items() if not fact.is_trained} == {"1.bias", "2.weight"}
    assert {name for name, fact in facts.items() if fact.is_replicated} == {"0.1.weight", "0.1.bias", "scale"}
    assert {name for name, fact in facts.items() if fact.itemsize == 8} == {"2.weight", "2.bias"}
    assert not any(fact.is_float8 for fact in facts.values())
