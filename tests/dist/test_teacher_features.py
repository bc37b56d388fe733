"""A student that reads what its frozen teacher gave learns what it learns from the teacher itself, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.distilling import distill
from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

_EPOCHS, _STEPS = 5, 3  # of 4 micro-batches of 5 images each; 50 images: two of them are left out


def _plan(cache: Path | None, level: int, num_ranks: int, *further: str) -> ResolvedRun:
    loss = "config.LOSS.feature_distillation_loss"
    words = [
        "config.DATA.AUGMENTATION_PERIOD=2",
        f"config.DISTILLATION={{CACHE_FEATURES: {cache is not None}, CACHE_FOLDER: '{cache or ''}'}}",
        f"{loss}={{queue_weight: 1, global_weight: 0.5, dense_weight: 0.5, queue_size: 30, teacher: digits}}",
        "config.MODEL.HEAD.PARAMS=[[map_projection_head, {dims: [-1, -1]}]]",
        "config.DATA.TRAIN.DATA_LIMIT=50",
        "config.DATA.TRAIN.DROP_LAST=true",
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={4 // num_ranks}",
        "config.ZERO.gradient_accumulation_steps=4",
        "config.DATA.NUM_DATALOADER_WORKERS=0",
        f"config.OPTIMIZER.num_epochs={_EPOCHS}",
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_ranks}",
        "config.MACHINE.DEVICE=cpu",
        "config.TRAINER.DTYPE=float64",
        f"config.ZERO.LEVEL={level}",
        *further,
    ]
    run = compose("digits/feature_distillation", words).run
    return resolve(run, "runs/x", host=Host(num_gpus=0, why_no_gpu="", num_cores=2))


def _trained(plan: ResolvedRun) -> tuple[list[float], int]:
    """Train; returns the losses, and the micro-batches for which the teacher ran, -1 where nothing counts them."""
    run, losses = distill(plan)
    return losses, -1 if run.teacher_features is None else run.teacher_features.num_computed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_same_bits_with_and_without_at_levels_0_and_3(tmp_path: Path) -> None:
    for level, further in ((0, ()), (3, ("config.TRAINER.EXACT_ACCUMULATION=true",))):
        caching = _plan(tmp_path / str(level), level, 2, *further)
        plain, _ = run_on_ranks(2, _trained, _plan(None, level, 2, *further), timeout_s=100)[0]
        kept, num_computed = run_on_ranks(2, _trained, caching, timeout_s=100)[0]
        assert len(kept) == _EPOCHS * _STEPS and kept == plain
        # Two epochs of 12 micro-batches; later those in which an image comes that had been left out.
        assert 24 <= num_computed < 36
        again = run_on_ranks(2, _trained, caching, timeout_s=100)[0]
        assert again[0] == plain and again[1] < num_computed - 20


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_any_number_of_ranks_goes_on_from_what_others_left(tmp_path: Path) -> None:
    cut = "config.TRAINER.MAX_STEPS=2"
    run_on_ranks(2, _trained, _plan(tmp_path, 3, 2, cut), timeout_s=100)
    plain, _ = run_on_ranks(1, _trained, _plan(None, 0, 1), timeout_s=100)[0]
    kept, num_computed = run_on_ranks(1, _trained, _plan(tmp_path, 0, 1), timeout_s=100)[0]
    assert kept == pytest.approx(plain, rel=1e-10)
    assert num_computed < 24 and len(list(tmp_path.glob("*/*.rows"))) == 3
