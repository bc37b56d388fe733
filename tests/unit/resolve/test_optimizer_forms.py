"""A test per row of docs/optimizer_forms.md: forms of OPTIMIZER, the optimizer that runs and the level."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.config.example_config import CPU_HOST, config
from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.run_config import RunConfig
from vissl_zero.resolve.optimizer_plan import optimizer_plan
from vissl_zero.resolve.resolve import problems
from vissl_zero.resolve.resolved import LarcPlan
from vissl_zero.resolve.sharding_plan import level

SDP = {"MODEL__SHARDED_DDP_SETUP__USE_SDP": True}
FSDP = {"MODEL__FSDP_CONFIG__AUTO_SETUP_FSDP": True}
DOCUMENTED: dict[str, Any] = {
    "name": "zero",
    "use_zero": True,
    "base_optimizer": {
        "name": "sgd",
        "use_larc": False,
        "larc_config": {"clip": False, "trust_coefficient": 0.001, "eps": 0.00000001},
        "weight_decay": 0.000001,
        "momentum": 0.9,
        "nesterov": False,
    },
}
# row -> (OPTIMIZER, other keys, base optimizer, level)
FORMS: dict[int, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    1: ({"name": "sgd"}, {}, "sgd", 0),
    2: ({}, {}, "sgd", 0),
    3: ({"name": "sgd", "use_zero": True}, {}, "sgd", 1),
    4: (DOCUMENTED, {}, "sgd", 1),
    5: ({"name": "zero", "base_optimizer": {"name": "adamw"}}, {}, "adamw", 1),
    6: ({"base_optimizer": {"name": "adamw"}}, {}, "adamw", 0),
    7: ({"name": "adamw", "use_zero": True, "base_optimizer": {"weight_decay": 0.1}}, {}, "adamw", 1),
    11: ({"name": "sgd", "base_optimizer": {"name": "sgd"}}, {}, "sgd", 0),
    13: ({"name": "sgd"}, SDP, "sgd", 2),
    14: (DOCUMENTED, SDP, "sgd", 2),
    15: ({"name": "sgd"}, FSDP, "sgd", 3),
    16: (DOCUMENTED, FSDP, "sgd", 3),
    18: ({"name": "sgd", "use_larc": True}, {}, "sgd", 0),
    19: ({"name": "sgd", "larc_config": {"clip": True}}, {}, "sgd", 0),
}
# row -> (OPTIMIZER, other keys, what is said)
REFUSED: dict[int, tuple[dict[str, Any], dict[str, Any], str]] = {
    8: (DOCUMENTED | {"use_zero": False}, {}, "config.OPTIMIZER.use_zero: contradicts name: zero (got False)"),
    9: ({"name": "zero", "momentum": 0.9}, {}, "Write config.OPTIMIZER.base_optimizer.name=sgd, for example, or"),
    10: ({"name": "adam", "base_optimizer": {"name": "sgd"}}, {}, "must name one optimizer (got 'adam' and"),
    12: ({"name": "zero", "base_optimizer": {"name": "zero"}}, {}, "not zero itself"),
    17: (DOCUMENTED, SDP | FSDP, "config.MODEL.SHARDED_DDP_SETUP.USE_SDP: cannot go with"),
}


def with_optimizer(block: dict[str, Any], **others: Any) -> RunConfig:
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Optimizer), block))
    return config(**{"ZERO__LEVEL": "auto", "OPTIMIZER": typed, **others})


def plan_of(block: dict[str, Any], global_batch: int = 256, **others: Any):
    return optimizer_plan(with_optimizer(block, **others), global_batch, 1)


def test_every_row_of_the_table_is_tested():
    text = (Path(__file__).parents[3] / "docs" / "optimizer_forms.md").read_text()
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert rows == FORMS.keys() | REFUSED.keys()


@pytest.mark.parametrize("row", FORMS)
def test_form(row):
    block, others, base, expected_level = FORMS[row]
    cfg = with_optimizer(block, **others)
    assert problems(cfg, CPU_HOST) == []
    assert optimizer_plan(cfg, 256, 1)[0].name == base
    assert level(cfg) == (expected_level, ())


@pytest.mark.parametrize("row", REFUSED)
def test_refused_form_says_why(row):
    block, others, text = REFUSED[row]
    said = [str(problem) for problem in problems(with_optimizer(block, **others), CPU_HOST)]
    assert len(said) == 1
    assert text in said[0]


def test_documented_form_is_exactly_that_sgd():
    plan, notes = plan_of(DOCUMENTED)
    assert (plan.name, plan.options) == ("sgd", {"momentum": 0.9, "nesterov": False})
    assert plan.weight_decay == plan.head_weight_decay == 1e-6
    assert plan.larc is None
    assert notes == ("config.OPTIMIZER: LARC is off (use_larc is not True), so larc_config has no effect.",)


def test_nested_wins_over_flat_and_the_rest_is_merged():
    flat = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.3}
    plan, _ = plan_of({"name": "zero", **flat, "base_optimizer": {"name": "sgd", "momentum": 0.8}})
    assert plan.options == {"momentum": 0.8, "nesterov": True}
    assert plan.weight_decay == 0.3


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        ({"use_larc": True}, {}, LarcPlan()),
        ({}, {"use_larc": True}, LarcPlan()),
        ({"use_larc": False}, {"use_larc": True, "larc_config": {"clip": True}}, LarcPlan(clip=True)),
        ({"use_larc": True}, {"use_larc": False}, None),
        (
            {"use_larc": True, "larc_config": {"clip": True, "eps": 1e-6}},
            {"larc_config": {"eps": 1e-5, "trust_coefficient": 0.02}},
            LarcPlan(True, 0.02, 1e-5),
        ),
    ],
)
def test_larc_outside_inside_or_both(outside, inside, expected):
    plan, _ = plan_of({"name": "zero", **outside, "base_optimizer": {"name": "sgd", **inside}})
    assert plan.larc == expected


def test_a_key_that_the_optimizer_does_not_have_is_said_once():
    plan, notes = plan_of({"name": "adamw", "momentum": 0.9, "PARAMS": {"eps": 1e-6}})
    assert plan.options == {"betas": [0.9, 0.999], "eps": 1e-6, "amsgrad": False}
    assert notes == ("config.OPTIMIZER: momentum has no effect on adamw.",)


def test_a_number_wins_and_names_each_key_it_overrides():
    cfg = with_optimizer(DOCUMENTED, **SDP, **FSDP, ZERO__LEVEL=3)
    assert level(cfg) == (
        3,
        (
            "config.ZERO.LEVEL=3 wins over config.OPTIMIZER.name=zero, which stands for level 1.",
            "config.ZERO.LEVEL=3 wins over config.MODEL.SHARDED_DDP_SETUP.USE_SDP, which stands for level 2.",
        ),
    )


def test_head_weight_decay():
    head = {"use_different_wd": True, "weight_decay": 0.5}
    plan, _ = plan_of({"weight_decay": 0.1, "head_optimizer_params": head})
    assert (plan.weight_decay, plan.head_weight_decay) == (0.1, 0.5)
