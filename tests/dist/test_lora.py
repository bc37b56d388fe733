"""MODEL.LORA: the numbers of plain torch in one process, at every level, number of ranks and tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.case import Case, build
from tests.dist.levels import largest_distance
from tests.dist.plain import train_plainly
from tests.dist.test_method_parity import Result, _train, make_method_plan
from tests.ranks import run_on_ranks
from vissl_zero.config.blocks.model_and_loss import Lora
from vissl_zero.resolve.resolved import OffloadPlan

TOLERANCE = 1e-10
# Two resolutions in each step; 8 and 5 samples are 3 ranks' unequal shares, and a rank of 2 leaves one without rows.
LORA = Lora(True, R=2, LORA_ALPHA=6, LORA_DROPOUT=0.3, TARGET_MODULES=["qkv", "attn.proj", "fc2"])
VIT = Case(trunk="vit", norm="none", optimizer="adamw", lr=0.01, num_steps=2, batch_sizes=(8, 5), lora=LORA)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_level_trains_what_one_process_trains(world_size: int) -> None:
    assert largest_distance(VIT, world_size, (0, 1, 2, 3)) < TOLERANCE


@pytest.mark.timeout(200)
def test_with_optimizer_state_on_nvme(tmp_path: Path) -> None:
    tier = OffloadPlan("nvme", str(tmp_path), pin_memory=False)
    assert largest_distance(VIT, 2, (3,), offload_optimizer=tier) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("trunk", ["vit", "timm_swin"])
def test_with_clipping_accumulation_and_recomputation(trunk: str) -> None:
    lora = replace(LORA, TARGET_MODULES="blocks.*[.](qkv|fc1)|layers.*[.](qkv|fc1)")
    case = replace(VIT, trunk=trunk, lora=lora, clip=0.05, num_micro_batches=2)
    assert largest_distance(case, 2, (0, 1, 2, 3), checkpoint_every=1) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_compiled() -> None:
    assert largest_distance(VIT, 2, (0, 3), compile="aot_eager") < TOLERANCE


def test_adapters_and_heads_alone_are_trained() -> None:
    """Or the tests above could not fail."""
    before, after = build(VIT).state_dict(), train_plainly(VIT).state
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if ".lora_" in name or name.startswith("heads.")}
    assert len([name for name in moved if ".lora_" in name]) == 2 * 3 * 2


def _runs(world_size: int, levels: list[int]) -> list[Result]:
    plans = [make_method_plan("ibot", level, world_size, "vit") for level in levels]
    for plan in plans:
        plan.config.MODEL.LORA = LORA
    return [_train(plan) for plan in plans]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_momentum_teacher_is_the_same_on_all_ranks() -> None:
    (alone,) = run_on_ranks(1, _runs, 1, [0], timeout_s=150)[0]
    for result in run_on_ranks(3, _runs, 3, [0, 3], timeout_s=150)[0]:
        assert result.distance(alone) < TOLERANCE
