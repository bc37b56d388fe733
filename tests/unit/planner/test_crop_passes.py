"""The forecast of a step in passes, and the advice to take it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist.test_method_parity import make_method_plan
from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.reporting.out_of_memory import same_numbers
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun


def _plan(method: str, **changes: int) -> ResolvedRun:
    return make_method_plan(method, 0, 1, "vit", max_steps=1, batch_per_rank=24, global_batch=24, **changes)


@pytest.mark.parametrize("method", ["ibot", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dino", "swav"))])
def test_the_forecast_of_activations_is_that_of_a_pass(method: str) -> None:
    whole, part = (dry_run(_plan(method, crop_passes=passes)).forecast for passes in (1, 4))
    assert whole.step is not None and part.step is not None and whole.seconds and part.seconds
    assert part.step.by_kind["activations"] < 0.5 * whole.step.by_kind["activations"]
    assert part.step.by_kind["inputs"] == whole.step.by_kind["inputs"]
    assert part.seconds > whole.seconds
    run, schedules, frozen = build_run(_plan(method, crop_passes=4), torch.device("cpu"))
    train(run, schedules, frozen, [])
    # Measured is the first pass, forecast the largest, with the gradients of all outputs.
    assert run.bytes.activations <= part.memory.activations < 1.5 * run.bytes.activations


def test_passes_of_a_joint_loss_are_forecast() -> None:
    plan = _plan("simclr", crop_passes=4)
    both = replace(plan, batch_per_rank=12, accumulation_steps=2, exact_accumulation=True)
    alone, joint = (dry_run(one).forecast.step for one in (plan, both))
    assert alone is not None and joint is not None
    assert joint.by_kind["activations"] < alone.by_kind["activations"]
    assert joint.by_kind["inputs"] == alone.by_kind["inputs"]


def _digits(*words: str) -> ResolvedRun:
    sizes = "{IMAGE_SIZE: 32, PATCH_SIZE: 8, NUM_LAYERS: 2, NUM_HEADS: 2, HIDDEN_DIM: 48, MLP_DIM: 96}"
    vit = "config.MODEL.TRUNK.NAME=vision_transformer", f"config.MODEL.TRUNK.VISION_TRANSFORMERS={sizes}"
    words = (*vit, "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 64]}]]", "config.ZERO.LEVEL=0", *words)
    return resolve(compose("digits/simclr", words).run, "/nowhere", recipe="r", host=Host(num_cores=1))


@pytest.mark.slow
def test_passes_are_advised_where_rows_are_alone() -> None:
    offered = {switch.override: switch.saved for switch in same_numbers(_digits())}
    assert offered["config.TRAINER.CROP_PASSES=8"] > 0
    plan = resolve(compose("digits/simclr", []).run, "/nowhere", recipe="r", host=Host(num_cores=1))
    assert not any("CROP_PASSES" in switch.override for switch in same_numbers(plan))


@pytest.mark.parametrize(
    ("recipe", "must"), [("digits/simclr", "share the statistics of batch norm"), ("digits/pirl", "all tiles of an")]
)
def test_a_model_whose_rows_see_each_other_is_refused(recipe: str, must: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main([f"config={recipe}", "config.TRAINER.CROP_PASSES=2", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "config.TRAINER.CROP_PASSES" in said and must in said and "Traceback" not in said
