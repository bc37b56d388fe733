"""From a plan to an optimizer, the user's own included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from vissl_zero.errors import ConfigError
from vissl_zero.optim.adaptation import Larc, Lars
from vissl_zero.optim.param_groups import build_optimizer
from vissl_zero.optim.whole_tensor import AdamW8bit, MuonAdamW, Shampoo
from vissl_zero.registry import OPTIMIZERS
from vissl_zero.resolve.resolved import LarcPlan, OptimizerPlan


def groups():
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    return [
        {"params": params[:1], "lr": 0.1, "weight_decay": 0.01, "name": "trunk"},
        {"params": params[1:], "lr": 0.2, "weight_decay": 0.0, "name": "head_no_decay"},
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("lars", torch.optim.SGD)],
)
def test_built_in_optimizers_with_the_defaults_of_their_config(name, expected):
    options = vars(OPTIMIZERS.get(name).config())
    optimizer, adaptation = build_optimizer(OptimizerPlan(name, options), groups())
    assert type(optimizer) is expected
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("trunk", 0.1, 0.01),
        ("head_no_decay", 0.2, 0.0),
    ]
    assert adaptation == (Lars() if name == "lars" else None)


ADAMS = {"betas": [0.8, 0.7], "eps": 1e-3}
MUONS = {**ADAMS, "momentum": 0.6, "nesterov": False, "ns_steps": 3, "ns_dtype": "float32", "adjust_lr_fn": "original"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.6, "nesterov": True}),
        ("lars", {"momentum": 0.6, "nesterov": True}),
        ("adam", {**ADAMS, "amsgrad": True}),
        ("adamw", {**ADAMS, "amsgrad": True}),
        ("lion", {"betas": [0.8, 0.7]}),
        ("lamb", {**ADAMS, "trust_clip": True, "always_adapt": True}),
        ("adafactor", {"beta2_decay": -0.5}),
        ("muon", MUONS),
        ("normuon", {**MUONS, "row_beta": 0.5}),
        ("shampoo", {**ADAMS, "matrix_eps": 1e-2, "frequency": 3, "block_size": 2}),
        ("adamw_8bit", {**ADAMS, "block_size": 4, "min_elements": 5}),
        ("adamw_schedule_free", {**ADAMS, "warmup_steps": 7, "r": 0.5, "weight_lr_power": 1.0}),
    ],
)
def test_every_key_reaches_the_optimizer(name, options):
    assert options.keys() <= vars(OPTIMIZERS.get(name).config()).keys()
    optimizer, _ = build_optimizer(OptimizerPlan(name, options), groups())
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if OPTIMIZERS.get(name).config is not None])
def test_what_no_key_sets_has_the_value_of_its_key(name):
    """So a loop of the user's own, which may leave options out, trains as a recipe that leaves their keys out."""
    plain, with_keys = (
        build_optimizer(OptimizerPlan(name, options), groups()) for options in ({}, vars(OPTIMIZERS.get(name).config()))
    )
    assert plain[1] == with_keys[1]
    for group, other in zip(plain[0].param_groups, with_keys[0].param_groups, strict=True):
        assert {**group, "params": []} == {**other, "params": []}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MuonAdamW, torch.optim.Muon),
        (MuonAdamW, torch.optim.AdamW),
        (AdamW8bit, torch.optim.AdamW),
        (Shampoo, torch.optim.Adam),
    ],
)
def test_rate_and_decay_default_to_those_of_the_optimizer_whose_steps_they_take(ours, theirs):
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    keys = ["lr"] if theirs is torch.optim.AdamW and ours is MuonAdamW else ["lr", "weight_decay"]
    assert [ours(params).defaults[key] for key in keys] == [theirs(params).defaults[key] for key in keys]


def test_keys_that_the_optimizer_calls_otherwise():
    lars = build_optimizer(OptimizerPlan("lars", {"eta": 0.5, "eps": 0.25, "exclude_bias_and_norm": True}), groups())
    assert lars[1] == Lars(0.5, 0.25, True)
    adafactor = build_optimizer(OptimizerPlan("adafactor", {"clip_threshold": 3.0}), groups())[0]
    assert adafactor.param_groups[0]["d"] == 3.0
    # Clipping by the norm of all gradients is ZERO.clip_grad's, and would look at more than a tensor.
    assert build_optimizer(OptimizerPlan("lamb"), groups())[0].param_groups[0]["max_grad_norm"] is None


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_adamw_runs_on_heads_unless_muon_is_asked_for(name):
    for asked, expected in ((False, [True, False]), (True, [True, True])):
        optimizer, _ = build_optimizer(OptimizerPlan(name, {"use_muon_on_heads": asked}), groups())
        assert [group["use_muon"] for group in optimizer.param_groups] == expected


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_larc_on_any_element_wise_optimizer(name):
    plan = OptimizerPlan(name, larc=LarcPlan(clip=True, trust_coefficient=0.02, eps=1e-6))
    assert build_optimizer(plan, groups())[1] == Larc(0.02, True, 1e-6)


def test_larc_on_lars_is_refused():
    with pytest.raises(ConfigError, match=r"OPTIMIZER\.use_larc: LARC cannot be put on top of lars.*use_larc=False"):
        build_optimizer(OptimizerPlan("lars", larc=LarcPlan()), groups())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("sgd", {"momentum": 0.0, "nesterov": True}, "Nesterov momentum requires a momentum"),
        ("sgd", {"momentum": -1.0}, "Invalid momentum"),
        ("adamw", {"betas": [1.5, 0.9]}, "Invalid beta parameter"),
        ("muon", {"ns_dtype": "float16"}, "ns_dtype must be one of bfloat16, float32, float64, got float16"),
        ("shampoo", {"betas": [0.9, 1.0]}, r"betas must be in \[0, 1\)"),
        ("shampoo", {"frequency": 0}, "frequency and block_size must be at least 1"),
        ("shampoo", {"block_size": 0}, "frequency and block_size must be at least 1"),
        ("shampoo", {"matrix_eps": 0.0}, "frequency and block_size must be at least 1, and matrix_eps above 0"),
        ("adamw_8bit", {"betas": [0.9, 1.0]}, r"betas must be in \[0, 1\)"),
        ("adamw_8bit", {"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_options_that_the_optimizer_refuses(name, options, reason):
    with pytest.raises(ConfigError, match=rf"config\.OPTIMIZER\.base_optimizer: {name} refuses its options: {reason}"):
        build_optimizer(OptimizerPlan(name, options), groups())


def test_unknown_name():
    with pytest.raises(ConfigError, match=r"got 'sdg'.*Did you mean 'sgd'"):
        build_optimizer(OptimizerPlan("sdg"), groups())


@dataclass
class SignConfig:
    """Keys of the optimizer below."""

    factor: float = 1.0


class Sign(torch.optim.Optimizer):
    """Steps of equal length."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"] * group["factor"])


def test_an_optimizer_of_the_users_own(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS, "_components", dict(OPTIMIZERS._components))

    @OPTIMIZERS.register("sign", config=SignConfig)
    def sign(groups, factor=1.0):
        """Steps of equal length."""
        return Sign(groups, {"factor": factor})

    given = groups()
    optimizer, adaptation = build_optimizer(OptimizerPlan("sign", {"factor": 2.0}, larc=LarcPlan()), given)
    for group in given:
        group["params"][0].grad = torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(
        given[0]["params"][0].detach(), torch.tensor([0.8, 1.2, 1.0], dtype=torch.float64), rtol=0, atol=1e-15
    )
    assert isinstance(adaptation, Larc)
