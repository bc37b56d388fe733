"""MODEL.PACK_CROPS: crops of several sizes as one sequence train what a pass per size trains, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.dist.test_crop_passes import BATCH
from tests.dist.test_method_parity import TOLERANCE, Result, _train, make_method_plan, plain
from tests.ranks import run_on_ranks
from vissl_zero.config.blocks.model_and_loss import Float8
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.models import packing
from vissl_zero.models.trunks import vision_transformer
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.resolve.resolved import Float8Plan, OffloadPlan, ResolvedRun


def _plan(method: str, level: int, world_size: int, trunk: str = "vit", **changes: Any) -> ResolvedRun:
    plan = make_method_plan(method, level, world_size, trunk, **changes)
    plan.config.MODEL.PACK_CROPS = True
    return plan


def _sharded(plan: ResolvedRun, **changes: Any) -> ResolvedRun:
    return dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, **changes))


def _cells(method: str, trunk: str, folder: str) -> list[Result]:
    """All levels in one task of the pool; then level 3 recomputed, on NVMe."""
    plans = [_plan(method, level, 2, trunk) for level in range(4)]
    tiers = {key: OffloadPlan("nvme", nvme_path=folder) for key in ("offload_params", "offload_optimizer")}
    return [_train(plan) for plan in (*plans, _sharded(plans[-1], checkpoint_every=1, **tiers))]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("method", "trunk"),
    [("dino", "vit"), *(pytest.param(name, "timm", marks=pytest.mark.slow) for name in ("ibot", "dinov3", "swav"))],
)
def test_a_method_equals_plain_torch(method: str, trunk: str, tmp_path: Path) -> None:
    for cell, result in enumerate(run_on_ranks(2, _cells, method, trunk, str(tmp_path))[0]):
        assert result.distance(plain(method, trunk)) < TOLERANCE, f"cell {cell}"


def _with_dropout(is_packing: bool, level: int, world_size: int, **changes: Any) -> ResolvedRun:
    plan = _plan("dino", level, world_size, **changes)
    plan.config.MODEL.PACK_CROPS = is_packing
    keys = plan.config.MODEL.TRUNK.VISION_TRANSFORMERS
    keys.DROPOUT_RATE, keys.DROP_PATH_RATE = 0.3, 0.3
    return plan


def _dropped(level: int) -> list[Result]:
    """Also recomputed, and in passes, of which some have no crop of one size."""
    whole = _with_dropout(True, level, 2)
    return [
        _train(plan) for plan in (_sharded(whole, checkpoint_every=1), _with_dropout(True, level, 2, crop_passes=5))
    ]


@pytest.mark.timeout(200)
def test_random_layers_draw_the_same() -> None:
    expected = _train(_with_dropout(False, 0, 1))
    assert abs(expected.losses[0] - plain("dino", "vit").losses[0]) > 1e-6, "nothing is dropped"
    for result in run_on_ranks(2, _dropped, 3)[0]:
        assert result.distance(expected) < TOLERANCE


def _uneven(is_packing: bool, level: int) -> Result:
    """The last batch of an epoch has two samples: the third rank has none."""
    plan = _plan("dino", level, 3)
    plan.config.MODEL.PACK_CROPS = is_packing
    plan.config.DATA.TRAIN.DATA_LIMIT, plan.config.DATA.TRAIN.DROP_LAST = BATCH + 2, False
    return _train(plan)


@pytest.mark.timeout(200)
def test_a_rank_without_samples_packs_nothing() -> None:
    whole = run_on_ranks(3, _uneven, False, 0)[0]
    assert run_on_ranks(3, _uneven, True, 3)[0].distance(whole) < TOLERANCE


NUM_PACKED: list[int] = []  # tokens of each packed sequence of the process


def _in_float8(is_packing: bool, levels: Sequence[int], world_size: int, scales: str) -> list[Result]:
    def noting(xs: Sequence[torch.Tensor]) -> torch.Tensor:
        sequence = packing.packed(xs)
        NUM_PACKED.append(sequence.shape[1])
        return sequence

    plans = [_sharded(_plan("dino", level, world_size), float8=Float8Plan(Float8.LAYERS, scales)) for level in levels]
    for plan in plans:
        plan.config.MODEL.PACK_CROPS = is_packing
    NUM_PACKED.clear()
    with patch.object(vision_transformer, "packed", noting):
        results = [_train(plan) for plan in plans]
    assert is_packing == any(tokens % 16 for tokens in NUM_PACKED)
    return results


@pytest.mark.timeout(200)
@pytest.mark.parametrize("scales", ["rows", "mx"])
def test_a_token_is_rounded_to_float8_alike_in_sequences_of_any_length(scales: str) -> None:
    (apart,) = run_on_ranks(1, _in_float8, False, [0], 1, scales)[0]
    assert apart.distance(plain("dino", "vit")) > 1e-6, "nothing is rounded"
    for result in run_on_ranks(2, _in_float8, True, [0, 3], 2, scales)[0]:
        assert result.distance(apart) < TOLERANCE


def _others(engine: str) -> list[Result]:
    if engine == "fairscale":
        return [_train(_sharded(_plan("dino", level, 2), engine=engine)) for level in (1, 2)]
    return [_train(_sharded(_plan("dino", 3, 2), compile=engine))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "engine",
    [pytest.param("fairscale", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.soak)],
)
def test_the_other_engine_and_compiled_blocks(engine: str) -> None:
    for result in run_on_ranks(2, _others, engine, timeout_s=280)[0]:
        assert result.distance(plain("dino", "vit")) < TOLERANCE


def test_the_forecast_is_that_of_packed_blocks() -> None:
    plan = _plan("dino", 0, 1, max_steps=1)
    forecast = dry_run(plan).forecast
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [])
    assert forecast.memory.activations == pytest.approx(run.bytes.activations, rel=0.05)
