"""A captured step gives the same loss and gradient norm again bit for bit, elsewhere but for rounding.

Weights, optimizer, teacher, queues, running statistics: all that the third step reads must be as it was before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.test_method_parity import make_method_plan
from tests.ranks import run_on_ranks
from vissl_zero.checkpoint.bad_step import open_state
from vissl_zero.checkpoint.folder import open_checkpoint
from vissl_zero.checkpoint.saver import CheckpointHook, Saver
from vissl_zero.config.blocks.output import CaptureBadStep
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.launch.replay import replay
from vissl_zero.reporting.bad_step_capture import BadStepCapture, BadStepRule
from vissl_zero.resolve.resolved import OffloadPlan, OptimizerPlan, ResolvedRun

BAD = 3


class _ThirdIsBad(BadStepRule):
    """Finds the third step bad, whose figures are finite: NaN would equal NaN whatever was restored."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_steps = 0

    def verdict(self, figures: Sequence[float], loss_scale: float) -> str:
        self.num_steps += 1
        return "the third" if self.num_steps == BAD else ""


class _Trace(Hook):
    """Keeps the figures of every step, and ends the run after the bad one."""

    def __init__(self) -> None:
        self.figures: list[tuple[float | None, float | None]] = []

    def on_record(self, run: Run, record: StepRecord) -> None:
        self.figures.append((record.loss, record.grad_norm))


def capture(plan: ResolvedRun) -> list[tuple[float | None, float | None]]:
    """Train with a capture of the third step; returns loss and gradient norm of each step."""
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hook, trace = BadStepCapture(CaptureBadStep()), _Trace()
    hook._rule = _ThirdIsBad()
    saving = CheckpointHook(Saver(run.folder, is_async=False, keep_last=-1, keep_every=-1), [], epochs=-1, steps=2)
    train(run, schedules, frozen, [hook, trace, saving])
    run.sharded.close()
    return trace.figures


def make(method: str, level: int, ranks: int, folder: str, **changes: Any) -> ResolvedRun:
    return make_method_plan(method, level, ranks, "batch", folder, **changes)


def _captured_and_replayed(method: str, level: int, ranks: int, folder: str, accumulation: int = 1) -> Any:
    plan = make(method, level, ranks, folder)
    batch = plan.batch_per_rank // accumulation
    plan = dataclasses.replace(plan, batch_per_rank=batch, accumulation_steps=accumulation)
    figures = capture(plan)
    return figures[BAD - 1], replay(plan, Path(folder) / "bad_steps/3")


def require_equal(found: Any) -> None:
    (loss, norm), result = found
    assert loss is not None and norm is not None and result["is_equal"]
    assert (float(result["loss"]), float(result["grad_norm"])) == (loss, norm)
    assert result["first_not_finite"] is None and result["modules"] and not result["samples_not_finite"]


@pytest.mark.parametrize(("level", "ranks", "accumulation"), [(0, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("method", ["swav", "dino"])
def test_is_equal_again(method: str, level: int, ranks: int, accumulation: int, tmp_path: Path) -> None:
    for found in run_on_ranks(ranks, _captured_and_replayed, method, level, ranks, str(tmp_path), accumulation):
        require_equal(found)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["moco_v2", "npid", "deepcluster_v2", "dinov3", "mae", "jigsaw", "vicregl"])
def test_is_equal_again_with_state_of_other_kinds(method: str, tmp_path: Path) -> None:
    for found in run_on_ranks(2, _captured_and_replayed, method, 3, 2, str(tmp_path)):
        require_equal(found)


def _captured(
    level: int, ranks: int, folder: str, changes: dict[str, Any], method: str = "swav_momentum", **sharding: Any
) -> Any:
    plan = make(method, level, ranks, folder, **changes)
    return capture(dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, **sharding)))


def _replayed(level: int, ranks: int, folder: str, method: str = "swav_momentum") -> Any:
    return replay(make(method, level, ranks, ""), Path(folder))


@pytest.mark.parametrize(("ranks", "method"), [(1, "swav_momentum"), (3, "swav_momentum"), (3, "vicregl")])
def test_other_levels_and_ranks_differ_by_rounding(ranks: int, method: str, tmp_path: Path) -> None:
    """Crops of two sizes, micro-batches that three ranks share unevenly, batch norm and a queue; boxes of crops."""
    ((loss, norm), *_) = [figures[BAD - 1] for figures in run_on_ranks(2, _captured, 3, 2, str(tmp_path), {}, method)]
    for result in run_on_ranks(ranks, _replayed, 0, ranks, str(tmp_path / "bad_steps/3"), method):
        assert abs(float(result["loss"]) - loss) < 1e-12 and abs(float(result["grad_norm"]) - norm) < 1e-12
        assert result["written"]["level"] == 3 and result["written"]["world_size"] == 2


ADAM = OptimizerPlan("adamw", {}, lr={"name": "constant", "value": 0.01})


def _captured_and_replayed_as(folder: str, level: int, sharding: dict[str, Any]) -> Any:
    plan = make("byol", level, 2, folder, optimizer=ADAM)
    plan = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, **sharding))
    figures = capture(plan)
    return figures[BAD - 1], replay(plan, Path(folder) / "bad_steps/3")


def require_state_before(folder: Path) -> None:
    """What was captured is the checkpoint that the run saved between the steps."""
    with (
        open_checkpoint(folder / "checkpoints/step_000000002") as saved,
        open_state(folder / "bad_steps/3") as captured,
    ):
        assert {name for name in captured.tensors if "/batch/" not in name} == set(saved.tensors)
        assert any(name.startswith("optimizer/exp_avg_sq/") for name in saved.tensors)
        assert any(name.startswith("teacher/") for name in saved.tensors)
        for name in saved.tensors:
            assert torch.equal(saved.read(name), captured.read(name)), name
        before, after = saved.manifest, captured.manifest
        for fact in ("step", "position", "loss_scale", "criterion", "world_size"):
            assert getattr(before, fact) == getattr(after, fact)
        for stem, rank in saved.ranks.items():
            assert (rank.rng, rank.scalars) == (captured.ranks[stem].rng, captured.ranks[stem].scalars)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("level", "engine"), [(1, "torch"), (2, "torch"), (2, "fairscale")])
def test_every_engine_is_equal_again(level: int, engine: str, tmp_path: Path) -> None:
    for found in run_on_ranks(2, _captured_and_replayed_as, str(tmp_path), level, {"engine": engine}):
        require_equal(found)
    require_state_before(tmp_path)


def test_state_on_a_disk_is_equal_again(tmp_path: Path) -> None:
    for name in ("nvme", "run"):
        (tmp_path / name).mkdir()
    tier = OffloadPlan("nvme", str(tmp_path / "nvme"))
    tiers = {"offload_optimizer": tier, "offload_params": tier}
    for found in run_on_ranks(2, _captured_and_replayed_as, str(tmp_path / "run"), 3, tiers):
        require_equal(found)
    require_state_before(tmp_path / "run")
