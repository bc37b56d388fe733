"""The rule of dynamic loss scaling."""

from __future__ import annotations

from inspect import signature

import torch

from vissl_zero.sharding.model.precision import LossScale


def test_halves_on_inf_and_doubles_after_the_interval() -> None:
    scale = LossScale(scale=8.0, growth_interval=3)
    seen = []
    for found_inf in (False, False, True, False, False, False, False):
        scale.update(found_inf)
        seen.append(scale.scale)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_state_survives_a_restart() -> None:
    scale = LossScale(scale=2.0, growth_interval=2)
    scale.update(False)
    other = LossScale(growth_interval=2)
    other.load_state_dict(scale.state_dict())
    other.update(False)
    assert (other.scale, other.good_steps) == (4.0, 0)


def test_the_scale_begins_and_changes_as_torchs() -> None:
    theirs = {name: item.default for name, item in signature(torch.amp.GradScaler).parameters.items()}
    scale = LossScale()
    assert scale.scale == theirs["init_scale"]
    for _ in range(theirs["growth_interval"] - 1):
        scale.update(False)
    assert scale.scale == theirs["init_scale"]
    scale.update(False)
    assert scale.scale == theirs["init_scale"] * theirs["growth_factor"]
    scale.update(True)
    assert scale.scale == theirs["init_scale"] * theirs["growth_factor"] * theirs["backoff_factor"]
