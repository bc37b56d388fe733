"""Keys that only fairscale reads: where they go, and where they are said to have no effect."""

from __future__ import annotations

import pytest

from tests.unit.config.example_config import GPU_HOST, complaints, config
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.sharding_plan import sharding_plan

SDP, FSDP = "MODEL__SHARDED_DDP_SETUP__", "MODEL__FSDP_CONFIG__"
AT_LEVEL_2 = {f"{SDP}reduce_buffer_size": 100}
AT_LEVEL_3 = {
    f"{FSDP}flatten_parameters": False,
    f"{FSDP}bucket_cap_mb": 25.0,
    f"{FSDP}clear_autocast_cache": False,
    f"{FSDP}FORCE_SYNC_CUDA": True,
    f"{FSDP}reshard_after_forward": False,
}


def _plan(level, **values):
    cfg = config(ZERO__ENGINE="fairscale", ZERO__LEVEL=level, **values)
    return sharding_plan(Decisions(cfg, GPU_HOST))


@pytest.mark.parametrize(("path", "value"), [*AT_LEVEL_2.items(), *AT_LEVEL_3.items()])
def test_a_key_reaches_the_plan_and_is_silent_at_its_level_alone(path, value):
    its_level = 2 if path in AT_LEVEL_2 else 3
    for level in (1, 2, 3):
        plan, notes = _plan(level, **{path: value})
        field = {"FORCE_SYNC_CUDA": "force_sync_cuda"}.get(path.split("__")[-1], path.split("__")[-1])
        assert getattr(plan, field) == value
        expected = (
            f"config.{path.replace('__', '.')} has no effect at level {level}: fairscale reads it at {its_level}."
        )
        assert notes == (() if level == its_level else (expected,))


def test_wrapping_by_size_below_level_3():
    values = {f"{FSDP}AUTO_WRAP_THRESHOLD": 5}
    assert _plan(3, **values)[1] == ()
    assert _plan(2, **values)[1] == (
        "config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect below level 3 of fairscale.",
    )


def test_reducing_in_float32_what_is_float32_anyway():
    values = {f"{FSDP}fp32_reduce_scatter": True}
    assert _plan(3, **values)[1] == (
        "config.MODEL.FSDP_CONFIG.fp32_reduce_scatter has no effect: parameters are computed in float32, and gradients "
        "reduced in it.",
    )
    plan, notes = _plan(3, **values, **{f"{FSDP}compute_dtype": "bfloat16"})
    assert (plan.precision.compute, plan.precision.reduce, notes) == ("bfloat16", "float32", ())


def test_fairscale_on_a_gpu_runs_every_level_but_0_and_level_3_in_float32_alone():
    for level in (1, 2, 3):
        assert complaints(GPU_HOST, ZERO__ENGINE="fairscale", ZERO__LEVEL=level) == []
    (complaint,) = complaints(GPU_HOST, ZERO__ENGINE="fairscale", ZERO__LEVEL=3, TRAINER__DTYPE="float64")
    assert "in float32 only" in complaint
    assert complaints(GPU_HOST, ZERO__ENGINE="fairscale", ZERO__LEVEL=2, TRAINER__DTYPE="float64") == []
