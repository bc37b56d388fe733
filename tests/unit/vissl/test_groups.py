"""OPTIMIZER's ways to group parameters, and VISSL's flat key of LARS."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.unit.config.example_config import complaints, config
from vissl_zero.config.compose import compose
from vissl_zero.optim.param_groups import param_groups
from vissl_zero.resolve.inactive import inactive_keys
from vissl_zero.resolve.optimizer_plan import optimizer_plan

HEAD = {
    "OPTIMIZER__head_optimizer_params__use_different_lr": True,
    "OPTIMIZER__head_optimizer_params__use_different_wd": True,
    "OPTIMIZER__head_optimizer_params__weight_decay": 0.5,
}
SINGLE = {"OPTIMIZER__construct_single_param_group_only": True}
DINO = {"OPTIMIZER__param_group_constructor": "dino"}


@pytest.mark.parametrize(
    ("keys", "grouping"), [({}, "default"), (SINGLE, "single"), (DINO, "dino"), (SINGLE | DINO, "single")]
)
def test_groups_without_heads_have_one_rate_and_one_decay(keys, grouping):
    cfg = config(**keys, **HEAD)
    plan, _ = optimizer_plan(cfg, 256, 1)
    assert plan.grouping == grouping
    has_heads = grouping == "default"
    assert (plan.head_weight_decay == 0.5) == has_heads and (plan.lr_head != plan.lr) == has_heads
    said = " ".join(inactive_keys(cfg))
    assert ("parameters are grouped otherwise" in said) != has_heads


def test_a_sweep_of_rates_needs_groups_of_heads():
    said = complaints(OPTIMIZER__head_optimizer_params__lr_factors=[0.1, 1.0], **SINGLE)
    assert any("needs a group for each head" in text for text in said)


def test_lars_takes_vissl_s_flat_key():
    plan, notes = optimizer_plan(config(OPTIMIZER__name="lars", OPTIMIZER__exclude_bias_and_norm=True), 256, 1)
    assert plan.options["exclude_bias_and_norm"] is True
    _, notes = optimizer_plan(config(OPTIMIZER__name="sgd", OPTIMIZER__exclude_bias_and_norm=True), 256, 1)
    assert any("exclude_bias_and_norm has no effect" in note for note in notes)


def test_keys_of_a_checkpoint_may_be_a_list():
    keys = "config.MODEL.WEIGHTS_INIT.STATE_DICT_KEY_NAME"
    run = compose("supervised/digits", [f"{keys}=[loss,teacher]"]).run
    assert run.MODEL.WEIGHTS_INIT.STATE_DICT_KEY_NAME == "loss.teacher"
    assert compose("supervised/digits").run.MODEL.WEIGHTS_INIT.STATE_DICT_KEY_NAME == "classy_state_dict"


def test_heads_of_a_linear_evaluation_have_rates_and_decays_of_their_own():
    model = torch.nn.Module()
    model.trunk = torch.nn.Linear(2, 2)
    head = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model.heads = torch.nn.ModuleList([head, copy.deepcopy(head)])
    keys = {
        "OPTIMIZER__param_group_constructor": "linear_eval_heads",
        "OPTIMIZER__linear_eval_heads": [{"lr": 0.5, "weight_decay": 0.25, "regularize_bn": True}, {"lr": 2.0}],
        "OPTIMIZER__weight_decay": 0.1,
    }
    plan, _ = optimizer_plan(config(**keys), 256, 1)
    groups = {group.name: group for group in param_groups(model, plan)}
    assert len(groups["head_0"].params) == 4 and groups["head_1_no_decay"].params == (
        "heads.1.0.weight",
        "heads.1.0.bias",
    )
    found = {name: (group.lr_factor, group.weight_decay) for name, group in groups.items()}
    assert found == {"trunk": (1, 0.1), "head_0": (0.5, 0.25), "head_1": (2, 0.1), "head_1_no_decay": (2, 0)}
    said = complaints(**keys | {"OPTIMIZER__linear_eval_heads": [{"lr": 1.0}, {"rate": 1.0}]})
    assert any("linear_eval_heads[1].rate: is not a key" in text for text in said)
    said = complaints(**keys)
    assert any("a block for each of the 1 heads" in text for text in said)


def test_vissl_s_names_of_a_transformer_s_tokens_do_not_decay():
    plan, _ = optimizer_plan(config(OPTIMIZER__non_regularized_parameters=["pos_embedding", "class_token"]), 256, 1)
    assert plan.non_regularized == ("pos_embedding", "pos_embed", "class_token", "cls_token")
