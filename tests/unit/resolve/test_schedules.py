"""Schedules after automatic scaling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.example_config import CPU_HOST, complaints
from vissl_zero.config.blocks.optimizer import AutoLrScaling, Optimizer, Scheduler
from vissl_zero.config.compose import compose
from vissl_zero.resolve.optimizer_plan import peak, resolved_schedules, scaled
from vissl_zero.resolve.resolve import resolve

AUTO = AutoLrScaling(auto_scale=True, base_value=0.3, base_lr_batch_size=256)
KEPT = AutoLrScaling(auto_scale=True, base_value=0.3, base_lr_batch_size=256, keep_shape=True)
SWAV = [
    {"name": "linear", "start_value": 0.6, "end_value": 4.8},
    {"name": "cosine", "start_value": 4.8, "end_value": 0.0048},
]


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
    schedule = Scheduler(name="composite", schedulers=SWAV, lengths=[0.1, 0.9], auto_lr_scaling=KEPT)
    result = scaled(schedule, 4096)
    assert result["schedulers"][0] == pytest.approx(SWAV[0])
    assert result["schedulers"][1] == pytest.approx(SWAV[1])


def test_a_kept_shape_scales_the_warm_up_with_the_rest():
    schedule = Scheduler(name="composite", schedulers=SWAV, lengths=[0.1, 0.9], auto_lr_scaling=KEPT)
    warm_up, cosine = scaled(schedule, 256)["schedulers"]
    assert (warm_up["start_value"], warm_up["end_value"]) == pytest.approx((0.0375, 0.3))
    assert (cosine["start_value"], cosine["end_value"]) == pytest.approx((0.3, 0.0003))


def _as_vissl(parts, lengths, global_batch, num_nodes, **auto):
    scaling = AutoLrScaling(auto_scale=True, base_value=0.3, base_lr_batch_size=256, **auto)
    schedule = Scheduler(
        name="composite",
        schedulers=parts,
        lengths=lengths,
        interval_scaling=["rescaled"] * len(parts),
        update_interval="step",
        auto_lr_scaling=scaling,
    )
    return scaled(schedule, global_batch, num_nodes)


# What infer_learning_rate of VISSL at 09270ed2 makes of the same block (benchmarks/vissl_schedules.py runs it).
def test_a_warm_up_begins_at_the_rate_of_one_machine_as_in_vissl():
    warm_up, cosine = _as_vissl(SWAV, [0.1, 0.9], 4096, num_nodes=8)["schedulers"]
    assert (warm_up["start_value"], warm_up["end_value"]) == pytest.approx((0.6, 4.8))
    assert (cosine["start_value"], cosine["end_value"]) == pytest.approx((4.8, 0.0048))
    warm_up, cosine = _as_vissl(SWAV, [0.1, 0.9], 1024, num_nodes=2)["schedulers"]
    assert (warm_up["start_value"], warm_up["end_value"]) == pytest.approx((0.6, 1.2))
    assert (cosine["start_value"], cosine["end_value"]) == pytest.approx((1.2, 0.0012))


def test_one_machine_has_no_warm_up_as_in_vissl():
    result = _as_vissl(SWAV, [0.1, 0.9], 512, num_nodes=1)
    assert result == {
        "name": "cosine",
        "start_value": pytest.approx(0.6),
        "end_value": pytest.approx(0.0006),
        "update_interval": "step",
    }


def test_a_line_that_falls_stays_on_one_machine_as_in_vissl():
    # With the root, four times the base batch doubles the rate, and one machine's rate is four times as high.
    line, cosine = _as_vissl(SWAV, [0.1, 0.9], 1024, num_nodes=1, scaling_type="sqrt")["schedulers"]
    assert (line["start_value"], line["end_value"]) == pytest.approx((1.2, 0.6))
    assert cosine["start_value"] == pytest.approx(0.6)


def test_other_parts_take_over_the_share_of_the_warm_up():
    parts = [SWAV[0], {"name": "constant", "value": 4.8}, SWAV[1]]
    result = _as_vissl(parts, [0.2, 0.2, 0.6], 512, num_nodes=1)
    assert [part["name"] for part in result["schedulers"]] == ["constant", "cosine"]
    assert (result["lengths"], result["interval_scaling"]) == (pytest.approx([0.25, 0.75]), ["rescaled"] * 2)


def test_each_part_begins_at_the_scaled_rate_as_in_vissl():
    parts = [{"name": "constant", "value": 0.5}, {"name": "step", "values": [2.0, 1.0]}]
    constant, steps = _as_vissl(parts, [0.5, 0.5], 512, num_nodes=1)["schedulers"]
    assert constant["value"] == pytest.approx(0.6)
    assert steps["values"] == pytest.approx([0.6, 0.3])


def test_a_run_says_that_it_has_no_warm_up():
    word = "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8"
    shape = "config.OPTIMIZER.param_schedulers.lr.auto_lr_scaling.keep_shape="
    said = {
        kept: any("warm-up is left out" in note for note in _notes(word, f"{shape}{kept}"))
        for kept in ("true", "false")
    }
    assert said == {"true": False, "false": True}


def _notes(*words):
    run = compose("pretrain/swav/resnet50", [*words, "config.DATA.TRAIN.DATA_SOURCES=[synthetic]"]).run
    return resolve(run, "/nowhere", host=CPU_HOST).notes


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


_PARTS = [
    {"name": "linear", "start_value": 0.1, "end_value": 1.0},
    {"name": "cosine", "start_value": 1.0, "end_value": 0.0},
]
_COMPOSITE = {"name": "composite", "schedulers": _PARTS, "lengths": [0.1, 0.9]}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (_COMPOSITE, ""),
        ({**_COMPOSITE, "lengths": [0.1, 0.9 + 9e-7]}, ""),
        ({**_COMPOSITE, "lengths": [0.1, 0.9 + 2e-6]}, ".lengths: must be positive and sum to 1"),
        ({**_COMPOSITE, "lengths": [0.1, 0.9 - 2e-6]}, ".lengths: must be positive and sum to 1"),
        ({**_COMPOSITE, "lengths": [0.0, 1.0]}, ".lengths: must be positive and sum to 1"),
        ({**_COMPOSITE, "lengths": [1.0]}, ": must have a length and an interval_scaling per part"),
        ({**_COMPOSITE, "lengths": [], "schedulers": []}, ": must have a length and an interval_scaling per part"),
        ({**_COMPOSITE, "interval_scaling": ["fixed"]}, ": must have a length and an interval_scaling per part"),
        ({**_COMPOSITE, "interval_scaling": ["fixed", "rescaled"]}, ""),
        ({**_COMPOSITE, "schedulers": [_PARTS[0], "cosine"]}, ".schedulers[1]: must be a block with a name"),
        ({**_COMPOSITE, "schedulers": [_PARTS[0], {"name": "cosin"}]}, ".schedulers[1].name: must be a known schedule"),
        (
            {**_COMPOSITE, "schedulers": [_PARTS[0], {"name": "cosine", "start_value": 1.0}]},
            ".schedulers[1].end_value: must be given",
        ),
        ({"name": "multistep", "values": [1.0, 0.1], "milestones": [9]}, ""),
        ({"name": "multistep", "values": [1.0], "milestones": []}, ""),
        ({"name": "multistep", "values": [1.0, 0.1], "milestones": [10]}, ".milestones: must lie before the end"),
        ({"name": "multistep", "values": [1.0], "milestones": [9]}, ": must have a value before, between and after"),
        (
            {"name": "multistep", "values": [1.0, 0.1, 0.01], "milestones": [9, 8]},
            ": must have a value before, between and after",
        ),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused_by_its_key(keys: dict[str, Any], named: str) -> None:
    changes = {f"OPTIMIZER.param_schedulers.lr.{key}": value for key, value in keys.items()}
    said = complaints(**changes, OPTIMIZER__num_epochs=10)
    if named:
        assert any(problem.startswith(f"config.OPTIMIZER.param_schedulers.lr{named}") for problem in said), said
    else:
        assert not said
