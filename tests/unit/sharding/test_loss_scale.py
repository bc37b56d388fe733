"""The rule of dynamic loss scaling."""

from __future__ import annotations

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
