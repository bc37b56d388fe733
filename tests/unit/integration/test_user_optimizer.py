"""The ``optimizer`` argument: what is taken, what is kept, what is refused."""

from __future__ import annotations

import functools

import pytest
import schedulefree
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.integration.user_optimizer import read_optimizer, unchanged_on_error
from vissl_zero.optim.update_rule import UpdateRule, update_rule


def _model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _built(optimizer, model):
    groups, factory = read_optimizer(optimizer, model)
    params = dict(model.named_parameters())
    local = [
        {"name": g.name, "params": [params[n] for n in g.params], "lr": 0.0, "weight_decay": g.weight_decay}
        for g in groups
    ]
    return factory(local)


@pytest.mark.parametrize(
    ("given", "expected", "settings"),
    [
        ({"type": "Adam", "lr": 0.001, "weight_decay": 0}, torch.optim.Adam, {"lr": 0.001, "fused": True}),
        ({"type": "AdamW", "lr": 0.1, "betas": (0.5, 0.9)}, torch.optim.AdamW, {"betas": (0.5, 0.9)}),
        ({"type": "SGD", "lr": 0.1}, torch.optim.SGD, {"momentum": 0.0, "lr": 0.1}),
        ({"type": "SGD", "lr": 0.1, "momentum": 0.5, "dampening": 0.5}, torch.optim.SGD, {"dampening": 0.5}),
        ({"type": "LARC", "lr": 0.2, "weight_decay": 0.3}, torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.3}),
        (torch.optim.AdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 1e-2}),
        (functools.partial(torch.optim.RMSprop, lr=3.0), torch.optim.RMSprop, {"lr": 3.0}),
    ],
)
def test_hyperparameters_arrive(given, expected, settings):
    optimizer, adaptation = _built(given, _model())
    assert type(optimizer) is expected
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings
    assert (adaptation is not None) == (isinstance(given, dict) and given["type"] == "LARC")


def test_a_ready_optimizer_is_itself_what_runs():
    model = _model()
    ready = torch.optim.SGD([{"params": [model[0].weight], "lr": 7.0}, {"params": model[1].parameters()}], lr=1.0)
    built, _ = _built(ready, model)
    assert built is ready
    assert [group["lr"] for group in built.param_groups] == [7.0, 1.0]
    assert [len(group["params"]) for group in built.param_groups] == [1, 2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lr": 1.0}, "optimizer.type: must be given."),
        (
            {"type": "Adm"},
            "optimizer.type: is not an optimizer that can run on shards (got 'Adm'). Did you mean",
        ),
        ({"type": "LBFGS"}, "optimizer.type: is not an optimizer that can run on shards (got 'LBFGS')."),
        ({"type": "LAMB", "max_grad_norm": 1.0}, "optimizer.max_grad_norm: is not a key of LAMB."),
        ({"type": "Adam", "learning_rate": 1.0}, "optimizer.learning_rate: is not a key of Adam."),
        ({"type": "Adam", "lr": -1.0}, "optimizer: Adam refuses its keys: Invalid learning rate: -1.0"),
        ({"type": "SGD", "lr": -1.0}, "optimizer: SGD refuses its keys: Invalid learning rate: -1.0"),
        ({"type": "SGD", "lr": "fast"}, "optimizer.lr: must be a number (got 'fast')"),
        ({"type": "LARC", "trust_coefficient": "x"}, "optimizer.trust_coefficient: must be a number (got 'x')"),
        (3, "optimizer: must be a dict, a class or an optimizer (got int)"),
        (len, "optimizer: must build a torch optimizer (got len)"),
    ],
)
def test_one_sentence_per_mistake(given, sentence):
    model = nn.Linear(3, 4, bias=False)
    with pytest.raises(ConfigError) as caught:
        _built(given, model)
    assert str(caught.value).startswith(sentence)


def test_foreign_parameters_and_past_steps_are_refused():
    model = _model()
    with pytest.raises(ConfigError, match="has a parameter that is not the model's"):
        read_optimizer(torch.optim.SGD(_model().parameters(), lr=1.0), model)
    stepped = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    stepped.step()
    with pytest.raises(ConfigError, match="has made steps already"):
        read_optimizer(stepped, model)


def test_nothing_to_train():
    with pytest.raises(ConfigError, match="has no parameter to train"):
        read_optimizer({"type": "SGD"}, _model().requires_grad_(False))


def test_a_fresh_adagrad_is_taken_and_keeps_its_first_sums():
    model = _model()
    ready = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    built, _ = _built(ready, model)
    assert built is ready
    weight = model[0].weight
    torch.testing.assert_close(built.state[weight]["sum"], torch.full_like(weight, 0.5))
    model(torch.ones(1, 3)).sum().backward()
    ready.step()
    with pytest.raises(ConfigError, match="has made steps already"):
        read_optimizer(ready, model)


def test_a_schedule_free_optimizer_is_taken_before_it_is_put_into_training_mode():
    model = _model()
    given = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    built, _ = _built(given, model)
    assert update_rule(built, [[(4, 3)]], is_flattened=False) is UpdateRule.ELEMENT_WISE


def test_first_sums_are_rounded_to_each_dtype():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 1, dtype=torch.float64))
    ready = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    expected = [ready.state[param]["sum"].clone() for param in model.parameters()]
    built, _ = _built(ready, model)
    for param, first in zip(model.parameters(), expected, strict=True):
        found = built.state[param]["sum"]
        assert found.dtype == param.dtype and torch.equal(found, first)


def test_a_rate_given_as_a_tensor_gives_the_updates_of_plain_torch():
    """Fused kernels would use another value than the plain ones, which round to the tensor's type."""
    for name in ("SGD", "Adam", "AdamW"):
        results = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            model, rate = nn.Linear(5, 7).double(), torch.tensor(1e-2)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate)
            if is_ours:
                optimizer, _ = _built({"type": name, "lr": rate}, model)
            for _ in range(3):
                model(torch.ones(2, 5).double()).square().sum().backward()
                optimizer.step()
            results.append(model.weight.detach())
        assert torch.equal(*results), name


def test_a_failure_gives_a_ready_optimizer_its_parameters_back():
    model = _model()
    ready = torch.optim.SGD(model.parameters(), lr=1.0)
    before = ready.param_groups[0]["params"]
    with pytest.raises(RuntimeError), unchanged_on_error(ready):
        ready.param_groups[0]["params"] = []
        raise RuntimeError
    assert ready.param_groups[0]["params"] is before
