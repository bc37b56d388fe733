"""Parameters in bfloat16: levels 0 to 3 give the same bits, a run resumes anywhere, and small updates are not lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.test_average import _Stored
from tests.dist.test_behaviour import _copied
from tests.dist.training import Case, Outcome, build, shard, train_step
from tests.ranks import run_on_ranks
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.resolve.resolved import Precision
from vissl_zero.sharding.sharded_model import ShardedModel

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "num_steps": 3, "lr": 0.02, "is_shallow": True}
CASES = {
    "sgd": Case(optimizer="sgd", frozen_steps=1, **SETTINGS),  # with batch norm, in float32
    "adamw": Case(optimizer="adamw", norm="group", num_micro_batches=2, batch_sizes=(11, 8), thin=True, **SETTINGS),
    "adam": Case(optimizer="adam", norm="none", tied=True, unused=True, dropout=0.2, **SETTINGS),
}


def _precision(rounding: str) -> Precision:
    return Precision("bfloat16", None, "bfloat16", "float32", rounding=rounding)


def _shard(case: Case, level: int, rounding: str) -> ShardedModel:
    return shard(case, level, precision=_precision(rounding), deterministic=True, seed=3)


def _states(case: Case, rounding: str) -> list[dict[str, Tensor]]:
    found = []
    for level in range(4):
        sharded, outcome = _shard(case, level, rounding), Outcome()
        for step in range(case.num_steps):
            train_step(sharded, case, step, outcome)
        found.append(sharded.full_state() | {"losses": torch.tensor(outcome.losses)})
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize(("name", "world_size"), [("sgd", 1), ("sgd", 3), ("adamw", 2), ("adamw", 3), ("adam", 2)])
def test_levels_give_the_same_bits(name: str, world_size: int, rounding: str) -> None:
    first, *others = run_on_ranks(world_size, _states, CASES[name], rounding)[0]
    assert len(set(first["losses"].tolist())) == CASES[name].num_steps
    for other in others:
        assert [key for key in first if not torch.equal(first[key], other[key])] == []
    formats = {key: value.dtype for key, value in first.items() if key != "losses" and value.is_floating_point()}
    is_norm = {key: "running" in key or (name == "sgd" and key.split(".")[-2] == "1") for key in formats}
    assert all(dtype == (torch.float32 if is_norm[key] else torch.bfloat16) for key, dtype in formats.items())


def _resume(rounding: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Of a run that goes on at another level, and of one that goes on from this rank's own state."""
    case = CASES["adamw"]
    first, second, third = _shard(case, 3, rounding), _shard(case, 0, rounding), _shard(case, 3, rounding)
    for step in range(2):
        train_step(first, case, step, Outcome())
    second.restore(_Stored(first))
    third.load_state_dict(_copied(first.state_dict()))
    for sharded in (first, second, third):
        train_step(sharded, case, 2, Outcome())
    whole = first.full_state()
    return {"elsewhere": (whole, second.full_state()), "here": (whole, third.full_state())}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_run_resumes_with_the_same_bits(rounding: str) -> None:
    for expected, got in run_on_ranks(2, _resume, rounding)[0].values():
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def _from_float32() -> str:
    case = CASES["adamw"]
    wide = shard(dataclasses.replace(case, dtype="float32"), 1)
    train_step(wide, dataclasses.replace(case, dtype="float32"), 0, Outcome())
    stored = _Stored(wide)
    narrow = _shard(case, 2, "stochastic")
    narrow.restore(stored)
    train_step(narrow, case, 1, Outcome())
    formats = {value.dtype for state in narrow.optimizer.state.values() for key, value in state.items() if "exp" in key}
    assert formats == {torch.float32}
    with pytest.raises(CheckpointError) as caught:
        _shard(case, 2, "kahan").restore(stored)
    return str(caught.value)


@pytest.mark.timeout(60)
def test_a_run_in_float32_goes_on_in_bfloat16_with_stochastic_rounding() -> None:
    assert "rounding_rest" in run_on_ranks(2, _from_float32)[0]


def _followed() -> list[str]:
    """What refuses parameters in bfloat16, for it would follow them by less than a last digit."""
    sharded, refused = _shard(CASES["adamw"], 2, "kahan"), []
    teacher = build(CASES["adamw"])
    for call in (lambda: sharded.average(0.5), lambda: sharded.adopt_teacher(teacher)):
        with pytest.raises(ConfigError, match="which follows in steps that bfloat16 would lose") as caught:
            call()
        refused.append(str(caught.value))
    sharded.adopt_teacher(teacher, follows=False)
    return refused


@pytest.mark.timeout(60)
def test_averages_and_teachers_that_follow_are_refused_and_a_fixed_teacher_is_not() -> None:
    average, teacher = run_on_ranks(1, _followed)[0]
    assert "a running average of the weights" in average and "a teacher that follows the student" in teacher


def _moved(rounding: str) -> tuple[float, float]:
    """How far 40 updates of 1e-4 move parameters near 1, in bfloat16, whose next number is 0.0039 or 0.0078 away."""
    case = Case(optimizer="sgd", norm="none", **SETTINGS)
    sharded = _shard(case, 1, rounding)
    shards = list(sharded._shards.values())  # type: ignore[attr-defined]
    for own in shards:
        own.assign(torch.ones_like(own.local))
    for group in sharded.optimizer.param_groups:
        group |= {"lr": 1e-4, "weight_decay": 0.0, "momentum": 0.0}
    for _ in range(40):
        for own in shards:
            own.local.grad = torch.ones_like(own.local)
        with sharded._parameter_guard.own_step():  # type: ignore[attr-defined]
            sharded._stepper.step(())  # type: ignore[attr-defined]
    values = torch.cat([own.local.detach().float().flatten() for own in shards])
    rests = [sharded.optimizer.state[own.local].get("rounding_rest", torch.zeros(())).float().sum() for own in shards]
    return 1 - float(values.mean()), 1 - float(values.mean() + sum(rests) / len(values))


@pytest.mark.timeout(60)
def test_small_updates_are_kept_where_rounding_to_the_nearest_drops_them() -> None:
    assert torch.tensor(1.0 - 1e-4, dtype=torch.float32).bfloat16() == 1
    assert run_on_ranks(2, _moved, "stochastic")[0][0] == pytest.approx(0.004, rel=0.2)
    values, sums = run_on_ranks(2, _moved, "kahan")[0]
    assert values == pytest.approx(0.0039, abs=1e-3) and sums == pytest.approx(0.004, rel=0.01)


def _refusals() -> list[str]:
    told = []
    for optimizer in ("muon", "lamb"):
        with pytest.raises(ConfigError) as caught:
            _shard(dataclasses.replace(CASES["sgd"], optimizer=optimizer), 0, "kahan")
        told.append(str(caught.value))
    sharded = _shard(CASES["adam"], 1, "kahan")
    with pytest.raises(ConfigError) as caught:
        sharded.average(0.9)
    return [*told, str(caught.value)]


@pytest.mark.timeout(60)
def test_what_bfloat16_cannot_hold_is_refused() -> None:
    *whole, average = run_on_ranks(1, _refusals)[0]
    assert all("cannot go with parameters in bfloat16" in told for told in whole)
    assert "a running average of the weights" in average
