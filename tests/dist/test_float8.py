"""MODEL.FLOAT8: the numbers of plain torch in one process, with the formats written out, at every level."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vissl_zero
from tests.dist.case import SEED, Case, Outcome, build, forward, loss_of, micro_batches, rows_of
from tests.dist.plain import train_plainly
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks
from vissl_zero import collectives
from vissl_zero.config.blocks.model_and_loss import Float8
from vissl_zero.config.resolved import Float8Plan
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.sharding import float8
from vissl_zero.sharding.float8 import Rows

TOLERANCE = 1e-10
ROWS, MX = (Float8Plan(Float8.LAYERS, scales) for scales in ("rows", "mx"))
# Two resolutions in each step; 8 and 5 samples are 3 ranks' unequal shares.
VIT = Case(trunk="vit", norm="none", optimizer="adamw", lr=0.01, batch_sizes=(8, 5), float8=ROWS)
VIT_IN_MX = replace(VIT, trunk="vit_wide", float8=MX)


def _levels(case: Case, levels: tuple[int, ...], plan: dict[str, Any]) -> list[Outcome]:
    return [train_sharded(case, level, plan) for level in levels]


def _largest(case: Case, world_size: int, levels: tuple[int, ...], **plan: Any) -> float:
    outcomes = run_on_ranks(world_size, _levels, case, levels, plan, timeout_s=280)[0]
    reference = train_plainly(case)
    distances = [max(outcome.distance(reference).values()) for outcome in outcomes]
    print(f"{world_size} ranks, levels {levels}: {', '.join(f'{distance:.1e}' for distance in distances)}")
    return max(distances)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_level_trains_what_one_process_trains(world_size: int) -> None:
    assert _largest(VIT, world_size, (0, 1, 2, 3)) < TOLERANCE


@pytest.mark.timeout(280)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_level_trains_what_one_process_trains_in_mxfp8(world_size: int) -> None:
    assert _largest(VIT_IN_MX, world_size, (0, 1, 2, 3)) < TOLERANCE


@pytest.mark.timeout(200)
@pytest.mark.parametrize("plan", [ROWS, MX])
def test_with_accumulation_clipping_and_recomputation(plan: Float8Plan) -> None:
    case = Case(trunk="vit", norm="none", num_micro_batches=2, num_steps=3, clip=0.05, float8=plan)
    assert _largest(case, 2, (0, 3), checkpoint_every=1) < TOLERANCE


def test_other_layers_by_name() -> None:
    case = Case(trunk="vit", norm="none", num_steps=3, float8=Float8Plan("fc1|projection_head"))
    assert _largest(case, 2, (2,)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", [ROWS, MX])
def test_compiled(plan: Float8Plan) -> None:
    case = Case(trunk="vit", norm="none", optimizer="adamw", lr=0.01, num_steps=4, float8=plan)
    assert _largest(case, 2, (3,), compile="aot_eager") < TOLERANCE


def test_float8_is_what_runs() -> None:
    """Or the tests above could not fail."""
    plain = Case(trunk="vit", norm="none", optimizer="adamw", lr=0.01, batch_sizes=(8, 5))
    distance = train_plainly(VIT).distance(train_plainly(plain))
    assert distance["grad_norm"] > 1e-3 < distance["state"]
    distance = train_plainly(VIT).distance(train_plainly(replace(VIT, float8=MX)))
    assert distance["grad_norm"] > 1e-3 < distance["state"]


def _quantize_with_one_scale(matrix: torch.Tensor, dtype: torch.dtype) -> Rows:
    scale = matrix.abs().amax() / torch.finfo(dtype).max
    return Rows((matrix / scale).to(dtype), scale.expand(len(matrix), 1))


def _gradients(num_parts: int) -> dict[str, torch.Tensor]:
    """Of the loss of one batch, computed part by part as so many ranks would."""
    model = build(VIT)
    float8.quantize_layers(model, VIT.float8)
    (images,) = micro_batches(VIT, 0)
    num_samples = images[0].shape[1]
    for part in range(num_parts):
        rows = rows_of(part, num_parts, num_samples)
        set_random_key(SEED, 0, rows)
        loss = loss_of(forward(model, VIT, [crops[:, rows] for crops in images]), len(rows))
        (loss * len(rows) / num_samples).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("has_one_scale", [False, True])
def test_one_scale_for_a_tensor_would_depend_on_the_number_of_ranks(
    has_one_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why rows have scales of their own."""
    if has_one_scale:
        monkeypatch.setattr(float8, "quantize", _quantize_with_one_scale)
    whole, parts = _gradients(1), _gradients(2)
    largest = max(float((parts[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    print(f"largest relative difference of a gradient: {largest:.1e}")
    assert largest > 1e-2 if has_one_scale else largest < 1e-14


def _own_loop(zero: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(OrderedDict(fc1=nn.Linear(6, 10), act=nn.Tanh(), fc2=nn.Linear(10, 6))) for _ in range(2)]
    model = nn.Sequential(*blocks).double()
    x = torch.randn(6, 6, dtype=torch.float64)[dist.get_rank() :: dist.get_world_size()]
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, zero)
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(collectives.all_reduce_sum(loss.detach()) / dist.get_world_size()))
    return losses


def test_a_loop_of_ones_own() -> None:
    plain = run_on_ranks(1, _own_loop, {"level": 0})[0]
    one = run_on_ranks(1, _own_loop, {"level": 0, "float8": True})[0]
    assert one != plain and one == pytest.approx(plain, rel=0.1)
    for zero in ({"level": 3, "float8": True}, {"level": 1, "float8": "fc"}):
        assert run_on_ranks(3, _own_loop, zero)[0] == pytest.approx(one, abs=TOLERANCE)
    mx = {"float8": True, "float8_scales": "mx"}
    in_mx = run_on_ranks(1, _own_loop, {"level": 0, **mx})[0]
    assert in_mx != one and in_mx == pytest.approx(plain, rel=0.1)
    assert run_on_ranks(3, _own_loop, {"level": 2, **mx})[0] == pytest.approx(in_mx, abs=TOLERANCE)


def _in_half(case: Case) -> list[Outcome]:
    return [train_sharded(case, level) for level in range(4)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast(dtype: str) -> None:
    """Half precision rounds by the order of sums, and a float8 may then fall to the other side."""
    case = Case(trunk="vit", norm="none", num_steps=3, lr=0.01, dtype="float32", autocast=dtype, float8=ROWS)
    reference = train_plainly(case)
    for outcome in run_on_ranks(2, _in_half, case)[0]:
        print(outcome.distance(reference))
        assert outcome.losses == pytest.approx(reference.losses, abs=0.02)


def _deterministic(case: Case) -> list[Outcome]:
    return [train_sharded(case, level, {"deterministic": True}) for level in range(4)]


@pytest.mark.parametrize("plan", [ROWS, MX])
def test_the_same_bits_at_every_level(plan: Float8Plan) -> None:
    case = Case(trunk="vit", norm="none", num_steps=3, lr=0.01, dtype="float32", float8=plan)
    first, *others = run_on_ranks(2, _deterministic, case)[0]
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.state[name], tensor) for name, tensor in first.state.items())
