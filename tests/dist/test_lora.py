"""MODEL.LORA: the numbers of plain torch in one process, at every level, number of ranks and tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.case import Case, Outcome, build
from tests.dist.plain import train_plainly
from tests.dist.test_method_parity import Result, _train, make_method_plan
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks
from vissl_zero.config.blocks.model_and_loss import Lora
from vissl_zero.resolve.resolved import OffloadPlan

TOLERANCE = 1e-10
# Two resolutions in each step; 8 and 5 samples are 3 ranks' unequal shares, and a rank of 2 leaves one without rows.
LORA = Lora(True, R=2, LORA_ALPHA=6, LORA_DROPOUT=0.3, TARGET_MODULES=["qkv", "attn.proj", "fc2"])
VIT = Case(trunk="vit", norm="none", optimizer="adamw", lr=0.01, num_steps=2, batch_sizes=(8, 5), lora=LORA)


def _levels(case: Case, levels: tuple[int, ...], plan: dict[str, Any]) -> list[Outcome]:
    return [train_sharded(case, level, plan) for level in levels]


def _largest(case: Case, world_size: int, levels: tuple[int, ...], **plan: Any) -> float:
    outcomes = run_on_ranks(world_size, _levels, case, levels, plan, timeout_s=280)[0]
    reference = train_plainly(case)
    stored = {name: tensor for name, tensor in reference.state.items() if name in outcomes[0].state}  # no index tables
    distances = [max(outcome.distance(replace(reference, state=stored)).values()) for outcome in outcomes]
    print(f"{world_size} ranks, levels {levels}: {', '.join(f'{distance:.1e}' for distance in distances)}")
    return max(distances)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_level_trains_what_one_process_trains(world_size: int) -> None:
    assert _largest(VIT, world_size, (0, 1, 2, 3)) < TOLERANCE


@pytest.mark.timeout(200)
def test_with_optimizer_state_on_nvme(tmp_path: Path) -> None:
    assert _largest(VIT, 2, (3,), offload_optimizer=OffloadPlan("nvme", str(tmp_path), pin_memory=False)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("trunk", ["vit", "timm_swin"])
def test_with_clipping_accumulation_and_recomputation(trunk: str) -> None:
    lora = replace(LORA, TARGET_MODULES="blocks.*[.](qkv|fc1)|layers.*[.](qkv|fc1)")
    case = replace(VIT, trunk=trunk, lora=lora, clip=0.05, num_micro_batches=2)
    assert _largest(case, 2, (0, 1, 2, 3), checkpoint_every=1) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_compiled() -> None:
    assert _largest(VIT, 2, (0, 3), compile="aot_eager") < TOLERANCE


def test_adapters_and_heads_alone_are_trained() -> None:
    """Or the tests above could not fail."""
    before, after = build(VIT).state_dict(), train_plainly(VIT).state
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if ".lora_" in name or name.startswith("heads.")}
    assert len([name for name in moved if ".lora_" in name]) == 2 * 3 * 2


def _runs(method: str, world_size: int, levels: list[int]) -> list[Result]:
    plans = [make_method_plan(method, level, world_size, "vit") for level in levels]
    for plan in plans:
        plan.config.MODEL.LORA = LORA
    return [_train(plan) for plan in plans]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["supervised", pytest.param("ibot", marks=pytest.mark.slow)])
def test_first_weights_and_momentum_teachers_are_the_same_on_all_ranks(method: str) -> None:
    (alone,) = run_on_ranks(1, _runs, method, 1, [0], timeout_s=150)[0]
    for result in run_on_ranks(3, _runs, method, 3, [0, 3], timeout_s=150)[0]:
        assert result.distance(alone) < TOLERANCE
