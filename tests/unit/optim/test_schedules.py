"""Schedules against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from vissl_zero.errors import ConfigError
from vissl_zero.optim.schedules import build_schedule
from vissl_zero.registry import SCHEDULERS

# VISSL's block holds the keys of all schedules; those that are not the named one's do not count.
UNUSED = {
    "value": 9.0,
    "values": [9.0, 8.0, 7.0],
    "milestones": [1, 2],
    "start_value": 9.0,
    "end_value": 9.0,
    "schedulers": [],
    "lengths": [],
    "interval_scaling": [],
    "auto_lr_scaling": {"auto_scale": False},
}


def values(config, steps_per_epoch, num_epochs):
    schedule = build_schedule({**UNUSED, **config}, steps_per_epoch, num_epochs)
    return [schedule(step) for step in range(steps_per_epoch * num_epochs)]


def cosine(start, end, where):
    return end + (start - end) * (1 + math.cos(math.pi * where)) / 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "constant", "value": 0.5, "update_interval": "step"}, [0.5] * 8),
        (
            {"name": "linear", "start_value": 0.0, "end_value": 0.8, "update_interval": "step"},
            [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
        ),
        (
            {"name": "linear", "start_value": 0.0, "end_value": 0.8, "update_interval": "epoch"},
            [0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6],
        ),
        (
            {"name": "cosine", "start_value": 1.0, "end_value": 0.1, "update_interval": "step"},
            [cosine(1.0, 0.1, step / 8) for step in range(8)],
        ),
        (
            {"name": "cosine", "start_value": 1.0, "end_value": 0.1, "update_interval": "epoch"},
            [cosine(1.0, 0.1, epoch / 4) for epoch in range(4) for _ in range(2)],
        ),
        (
            {"name": "multistep", "values": [1.0, 0.1, 0.01], "milestones": [1, 3], "update_interval": "epoch"},
            [1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01],
        ),
        (
            {"name": "step", "values": [1.0, 0.1], "update_interval": "epoch"},
            [1.0] * 4 + [0.1] * 4,
        ),
        (
            {"name": "step", "values": [4.0, 3.0, 2.0, 1.0], "update_interval": "step"},
            [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0],
        ),
    ],
)
def test_single_schedules_over_four_epochs_of_two_steps(config, expected):
    assert values(config, steps_per_epoch=2, num_epochs=4) == pytest.approx(expected, rel=1e-12, abs=1e-15)


WARM_UP = {"name": "linear", "start_value": 0.2, "end_value": 1.0, "update_interval": "epoch"}
DECAY = {"name": "cosine", "start_value": 1.0, "end_value": 0.0}


def test_warm_up_then_cosine_rescaled():
    # The recipe of SwAV: the parts follow the composite's update_interval, not their own.
    config = {
        "name": "composite",
        "schedulers": [WARM_UP, DECAY],
        "lengths": [0.25, 0.75],
        "interval_scaling": ["rescaled", "rescaled"],
        "update_interval": "step",
    }
    expected = [0.2, 0.6] + [cosine(1.0, 0.0, step / 6) for step in range(6)]
    assert values(config, 2, 4) == pytest.approx(expected, rel=1e-12)
    assert values({**config, "interval_scaling": []}, 2, 4) == pytest.approx(expected, rel=1e-12)


def test_fixed_cosine_is_cut_out_of_the_whole_run():
    config = {
        "name": "composite",
        "schedulers": [WARM_UP, DECAY],
        "lengths": [0.25, 0.75],
        "interval_scaling": ["rescaled", "fixed"],
        "update_interval": "epoch",
    }
    expected = [0.2, 0.2] + [cosine(1.0, 0.0, epoch / 4) for epoch in (1, 2, 3) for _ in range(2)]
    assert values(config, 2, 4) == pytest.approx(expected, rel=1e-12)


def test_lengths_may_miss_one_by_rounding_and_the_config_is_left_alone():
    config = {
        "name": "composite",
        "schedulers": [WARM_UP, DECAY],
        "lengths": [0.333, 0.6666],
        "update_interval": "step",
    }
    build_schedule(config, 2, 4)
    assert config["lengths"] == [0.333, 0.6666]


def test_the_schedule_stretches_with_the_length_of_the_run():
    config = {"name": "multistep", "values": [1.0, 0.1], "milestones": [3], "update_interval": "epoch"}
    assert values(config, 3, 4) == [1.0] * 9 + [0.1] * 3


def test_default_update_intervals_are_classy_visions():
    constant, linear = ({"name": "constant", "value": 1.0}, {"name": "linear", "start_value": 0.0, "end_value": 1.0})
    assert build_schedule(linear, 2, 2)(1) == pytest.approx(0.25)  # per step
    multistep = build_schedule({"name": "multistep", "values": [1.0, 2.0], "milestones": [1]}, 2, 2)
    assert [multistep(step) for step in range(4)] == [1.0, 1.0, 2.0, 2.0]
    composite = build_schedule({"name": "composite", "schedulers": [constant, linear], "lengths": [0.5, 0.5]}, 2, 2)
    assert [composite(step) for step in range(4)] == pytest.approx([1.0, 1.0, 0.0, 0.5])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step", "multistep"])
def test_the_end_of_a_long_run_and_beyond(name):
    config = {"name": name, "value": 1.0, "start_value": 2.0, "end_value": 1.0, "values": [2.0, 1.0], "milestones": [1]}
    schedule = build_schedule({**config, "update_interval": "step"}, 1_000_000, 4)
    assert schedule(3_999_999) == pytest.approx(1.0, abs=1e-5)
    assert schedule(4_000_000) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"name": "cosin"}, "must be a known schedule.*Did you mean 'cosine'"),
        ({"name": "cosine", "start_value": 1.0}, "the cosine schedule cannot be built: .*end_value"),
        ({"name": "multistep", "values": [1.0], "milestones": [1]}, "multistep schedule cannot be built: MultiStep"),
        ({"name": "multistep", "values": [1.0, 2.0], "milestones": [9]}, "Milestone must be smaller than total"),
        ({"name": "linear", "start_value": 0, "end_value": 1, "update_interval": "day"}, "must be step or epoch"),
        ({"name": "composite", "schedulers": [DECAY], "lengths": [0.5]}, "sum of all values in lengths must be 1"),
        ({"name": "composite", "schedulers": [DECAY, DECAY], "lengths": [0, 1]}, "lengths must be positive"),
        ({"name": "composite", "schedulers": [DECAY], "lengths": [1], "interval_scaling": ["fixed"] * 2}, "2 entries"),
        ({"name": "composite", "schedulers": [DECAY], "lengths": [1], "interval_scaling": ["x"]}, "Unsupported"),
        ({"name": "composite", "schedulers": [{"name": "line"}], "lengths": [1]}, "Did you mean 'linear'"),
        ({"name": "composite", "schedulers": [{"value": 1}], "lengths": [1]}, "a schedule must have a name"),
    ],
)
def test_wrong_keys_are_said(config, reason):
    with pytest.raises(ConfigError, match=rf"config\.OPTIMIZER\.param_schedulers.*{reason}"):
        build_schedule(config, 2, 4)


def test_a_schedule_of_the_users_own_also_inside_a_composite(monkeypatch):
    monkeypatch.setattr(SCHEDULERS, "_components", dict(SCHEDULERS._components))

    @SCHEDULERS.register("squared")
    def squared(config, num_epochs):
        """A parabola."""
        return lambda where: config["top"] * where**2

    assert values({"name": "squared", "top": 4.0}, 2, 1) == [0.0, 1.0]
    config = {"name": "composite", "schedulers": [WARM_UP, {"name": "squared", "top": 4.0}], "lengths": [0.5, 0.5]}
    assert values({**config, "update_interval": "step"}, 2, 2) == pytest.approx([0.2, 0.6, 0.0, 1.0])


HALF_ADAPTIVE = [
    4.8,
    4.342099145713374,
    3.1432991457133737,
    1.661500854286626,
    0.4627008542866262,
    2.4023999999999996,
    2.1734495728566867,
    1.574049572856687,
    0.8331504271433128,
    0.2337504271433131,
]
FULL_ADAPTIVE = [
    3.5968486085619626,
    2.859232433935664,
    1.2522527947633688,
    0.09586306954142802,
    0.11582742858845001,
    0.594259507130235,
    1.0772888918405927,
    1.1681611667209206,
    0.7922349590269321,
    0.25829144794430803,
]
FULL = [
    4.8,
    3.815320373967869,
    1.6700852712491683,
    0.12636451057600526,
    0.4521514030241943,
    2.3798485883818126,
    4.32606922682476,
    4.692211541210882,
    3.1775307223941422,
    1.0261670291587521,
]
HALF = [
    4.8,
    3.1432991457133737,
    0.4627008542866262,
    2.171278752463437,
    0.8323212475365628,
    1.2,
    0.7870685558384688,
    0.1189314441615316,
    0.5431634575259842,
    0.21043654247401558,
]
# VISSL's CosineWarmRestartScheduler at 09270ed2 with start_value 4.8 and end_value 0.0048.
RESTARTS = [
    ({"wave_type": "half", "restart_interval_length": 0.5, "is_adaptive": True}, HALF_ADAPTIVE),
    ({"wave_type": "full", "restart_interval_length": 0.334, "is_adaptive": True}, FULL_ADAPTIVE),
    ({"wave_type": "full", "restart_interval_length": 0.334}, FULL),
    ({"wave_type": "half", "restart_interval_length": 0.25, "lr_multiplier": 0.5}, HALF),
]


@pytest.mark.parametrize(("keys", "wanted"), RESTARTS)
def test_warm_restarts_are_vissl_s(keys, wanted):
    config = {"name": "cosine_warm_restart", "start_value": 4.8, "end_value": 0.0048, "update_interval": "step", **keys}
    value = build_schedule(config, 20, 1)
    assert [value(step) for step in range(0, 20, 2)] == pytest.approx(wanted, rel=1e-12)
