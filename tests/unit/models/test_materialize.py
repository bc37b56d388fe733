"""Weights of a model on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.models.bare import materialize_


def _on_meta(build):
    with torch.device("meta"):
        return build()


def test_a_unit_gets_what_the_whole_model_would():
    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    whole, parts = _on_meta(build), _on_meta(build)
    materialize_(whole, "", seed=1)
    for name in ("2", "0", "1"):
        materialize_(parts.get_submodule(name), name, seed=1)
    assert whole.state_dict().keys() == parts.state_dict().keys()
    assert all(torch.equal(a, parts.state_dict()[name]) for name, a in whole.state_dict().items())
    assert not torch.equal(whole[0].bias, _materialized(build, seed=2)[0].bias)


def _materialized(build, seed):
    model = _on_meta(build)
    materialize_(model, "", seed)
    return model


def test_parameters_stay_the_same_objects_and_keep_their_format():
    model = _on_meta(lambda: nn.Linear(3, 4)).double()
    held = model.weight
    materialize_(model, "", seed=0)
    assert model.weight is held and held.dtype is torch.float64 and held.isfinite().all()


class _Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

    def reset_parameters(self):
        nn.init.zeros_(self.a)


class _WithoutReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (_Forgetful, r"model\.x: reset_parameters\(\) of _Forgetful leaves b without values"),
        (_WithoutReset, r"model\.x: is on the meta device, and _WithoutReset has no reset_parameters\(\)"),
    ],
)
def test_what_nobody_fills_is_refused(build, sentence):
    with pytest.raises(ConfigError, match=sentence):
        materialize_(_on_meta(build), "x", seed=0)
