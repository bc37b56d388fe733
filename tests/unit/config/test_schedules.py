"""Schedules after automatic scaling."""

from __future__ import annotations

import pytest

from vissl_zero.config.blocks.optimizer import AutoLrScaling, Optimizer, Scheduler
from vissl_zero.config.derive.optimizer import peak, resolved_schedules, scaled

AUTO = AutoLrScaling(auto_scale=True, base_value=0.3, base_lr_batch_size=256)


def test_without_auto_scale_nothing_is_touched():
    schedule = Scheduler(name="cosine", start_value=0.2, end_value=0.1)
    assert scaled(schedule, 4096) == {
        "name": "cosine",
        "start_value": 0.2,
        "end_value": 0.1,
        "update_interval": "epoch",
    }


def test_published_swav_schedule_stays_at_its_own_batch():
    # 64 GPUs x 64 images, base 0.3 per 256: VISSL publishes warm-up 0.6 -> 4.8, then cosine to 0.0048.
    parts = [
        {"name": "linear", "start_value": 0.6, "end_value": 4.8},
        {"name": "cosine", "start_value": 4.8, "end_value": 0.0048},
    ]
    schedule = Scheduler(name="composite", schedulers=parts, lengths=[0.1, 0.9], auto_lr_scaling=AUTO)
    result = scaled(schedule, 4096)
    assert result["schedulers"][0] == pytest.approx(parts[0])
    assert result["schedulers"][1] == pytest.approx(parts[1])


def test_warm_up_scales_with_the_rest():
    parts = [
        {"name": "linear", "start_value": 0.6, "end_value": 4.8},
        {"name": "cosine", "start_value": 4.8, "end_value": 0.0048},
    ]
    schedule = Scheduler(name="composite", schedulers=parts, lengths=[0.1, 0.9], auto_lr_scaling=AUTO)
    warm_up, cosine = scaled(schedule, 256)["schedulers"]
    assert (warm_up["start_value"], warm_up["end_value"]) == pytest.approx((0.0375, 0.3))
    assert (cosine["start_value"], cosine["end_value"]) == pytest.approx((0.3, 0.0003))


@pytest.mark.parametrize(("kind", "expected"), [("linear", 0.6), ("sqrt", 0.3 * 2**0.5)])
def test_scaling_types(kind, expected):
    auto = AutoLrScaling(auto_scale=True, base_value=0.3, base_lr_batch_size=256, scaling_type=kind)
    assert scaled(Scheduler(name="constant", value=1.0, auto_lr_scaling=auto), 512)["value"] == pytest.approx(expected)


def test_values_keep_their_ratios():
    schedule = Scheduler(name="multistep", values=[1.0, 0.1, 0.05], milestones=[1, 2], auto_lr_scaling=AUTO)
    assert scaled(schedule, 256)["values"] == pytest.approx([0.3, 0.03, 0.015])


def test_peak_looks_into_composites():
    parts = [{"name": "constant", "value": 0.5}, {"name": "step", "values": [0.1, 2.0]}]
    assert peak({"name": "composite", "schedulers": parts}) == 2.0


def test_heads_follow_the_trunk_unless_told_otherwise():
    block = Optimizer()
    block.param_schedulers.lr = Scheduler(name="constant", value=1.0)
    block.param_schedulers.lr_head = Scheduler(name="constant", value=2.0)
    assert resolved_schedules(block, 1).lr_head["value"] == 1.0
    block.head_optimizer_params.use_different_lr = True
    assert resolved_schedules(block, 1).lr_head["value"] == 2.0


def test_weight_decay_over_time():
    block = Optimizer()
    assert resolved_schedules(block, 1).weight_decay is None
    block.param_schedulers.weight_decay.name = "cosine"
    decay = resolved_schedules(block, 1)
    assert decay.weight_decay == decay.weight_decay_head
    assert decay.weight_decay is not None and decay.weight_decay["name"] == "cosine"
    block.head_optimizer_params.use_different_wd = True
    assert resolved_schedules(block, 1).weight_decay_head is None
