"""Decay rules and groups by full parameter name."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.optim.param_groups import freeze_untrainable, is_norm, param_groups
from vissl_zero.resolve.resolved import OptimizerPlan
from vissl_zero.vissl.keys import ALIASES


class ScaleNorm(nn.Module):
    """A norm layer of somebody else's."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(nn.Linear(1, width).bias.detach().clone())


class NormalizedLinear(nn.Linear):
    """Has "norm" in its name and a matrix: not a norm layer."""


class Net(nn.Module):
    """Every kind of parameter that a rule speaks of."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleDict(
            {
                "conv": nn.Conv2d(3, 4, 1),
                "bn": nn.BatchNorm2d(4),
                "gn": nn.GroupNorm(2, 4),
                "attention": nn.MultiheadAttention(4, 2),
                "custom": ScaleNorm(4),
            }
        )
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))])


CONV_AND_ATTENTION = {
    "trunk.conv.weight",
    "trunk.attention.in_proj_weight",
    "trunk.attention.out_proj.weight",
}
BIASES = {"trunk.conv.bias", "trunk.attention.in_proj_bias", "trunk.attention.out_proj.bias"}
NORM_WEIGHTS = {"trunk.bn.weight", "trunk.gn.weight", "trunk.custom.gain"}
NORM_BIASES = {"trunk.bn.bias", "trunk.gn.bias"}


def groups_of(model, **plan):
    return {g.name: g for g in param_groups(model, OptimizerPlan("sgd", weight_decay=0.1, **plan))}


@pytest.mark.parametrize(
    ("bn", "bias", "decayed"),
    [
        (False, True, CONV_AND_ATTENTION | BIASES),
        (False, False, CONV_AND_ATTENTION),
        (True, False, CONV_AND_ATTENTION | NORM_WEIGHTS),
        (True, True, CONV_AND_ATTENTION | BIASES | NORM_WEIGHTS | NORM_BIASES),
    ],
)
def test_decay_rules(bn, bias, decayed):
    groups = groups_of(Net(), regularize_bn=bn, regularize_bias=bias)
    assert set(groups["trunk"].params) == decayed
    everything = CONV_AND_ATTENTION | BIASES | NORM_WEIGHTS | NORM_BIASES
    rest = groups["trunk_no_decay"].params if "trunk_no_decay" in groups else ()
    assert set(rest) == everything - decayed


def test_head_has_a_weight_decay_of_its_own():
    groups = groups_of(Net(), head_weight_decay=0.5)
    assert groups["head"].params == ("heads.0.0.weight", "heads.0.0.bias", "heads.0.2.weight")
    assert groups["head_no_decay"].params == ("heads.0.1.weight", "heads.0.1.bias")
    assert [(g.is_head, g.is_decayed, g.weight_decay) for g in groups.values()] == [
        (False, True, 0.1),
        (False, False, 0.0),
        (True, True, 0.5),
        (True, False, 0.0),
    ]


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = Net()
    freeze_untrainable(model, ["module.trunk.conv.weight", "heads.0.1"])
    names = [name for group in groups_of(model).values() for name in group.params]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert "trunk.conv.weight" not in names
    assert "heads.0.1.weight" not in names
    assert "heads.0.0.weight" in names


def test_order_is_the_models():
    first, second = (groups_of(Net()) for _ in range(2))
    assert first == second
    names = [name for name, _ in Net().named_parameters()]
    assert all(list(g.params) == sorted(g.params, key=names.index) for g in first.values())


def test_tied_parameters_count_once():
    model = Net()
    model.heads[0][2].weight = model.trunk["attention"].out_proj.weight
    names = [name for group in groups_of(model).values() for name in group.params]
    assert "trunk.attention.out_proj.weight" in names
    assert "heads.0.2.weight" not in names


def test_non_regularized_is_a_part_of_the_name():
    groups = groups_of(Net(), non_regularized=("in_proj", "heads.0.2.weight"))
    assert {"trunk.attention.in_proj_weight", "trunk.attention.in_proj_bias"} <= set(groups["trunk_no_decay"].params)
    assert "heads.0.2.weight" in groups["head_no_decay"].params


def test_non_regularized_without_a_match_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        groups_of(Net(), non_regularized=("conv", "pos_embed", "cls_token"))
    assert [record.getMessage() for record in caplog.records] == [
        "config.OPTIMIZER.non_regularized_parameters: no parameter's name contains 'pos_embed' or 'cls_token', "
        "so it has no effect."
    ]


@pytest.mark.parametrize(("theirs", "ours"), ALIASES["parameters"].items())
def test_two_libraries_names_of_one_parameter_are_no_mistake(theirs, ours, caplog):
    for here in (theirs, ours):
        model = nn.Module()
        model.register_parameter(here, nn.Parameter(nn.Linear(1, 1).weight.detach()))
        with caplog.at_level(logging.WARNING):
            groups_of(model, non_regularized=(theirs, ours))
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            groups_of(nn.Linear(1, 1), non_regularized=(theirs, ours))
        assert f"no parameter's name contains {theirs!r} or {ours!r}" in caplog.records[0].getMessage()
        caplog.clear()


def test_empty_groups_are_left_out():
    assert list(groups_of(nn.Linear(2, 2))) == ["trunk"]


def test_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        groups_of(model)


def test_an_unknown_untrainable_name_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match=r"got 'trunk\.conv\.weigth'.*Did you mean 'trunk\.conv\.weight'"):
        freeze_untrainable(Net(), ["trunk.conv.weigth"])


def test_a_tied_parameter_is_frozen_by_any_of_its_names():
    for name in ("trunk.attention.out_proj.weight", "heads.0.2.weight"):
        model = Net()
        model.heads[0][2].weight = model.trunk["attention"].out_proj.weight
        freeze_untrainable(model, [name])
        assert not model.heads[0][2].weight.requires_grad


def test_a_module_name_does_not_freeze_its_namesakes():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    freeze_untrainable(model, ["a"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["ab.weight", "ab.bias"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.SyncBatchNorm(2), True),
        (nn.InstanceNorm2d(2, affine=True), True),
        (nn.LayerNorm(2), True),
        (nn.GroupNorm(1, 2), True),
        (nn.RMSNorm(2), True),
        (type("MyLayer", (nn.LayerNorm,), {})(2), True),
        (ScaleNorm(2), True),
        (NormalizedLinear(2, 2), False),
        (nn.Linear(2, 2), False),
        (nn.PReLU(2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_norm_layers_of_every_type(module, expected):
    assert is_norm(module) is expected


class Transformer(nn.Module):
    """What DINO's rule tells apart: biases, norms by name, tokens."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleDict({"norm1": nn.LayerNorm(4), "fc": nn.Linear(4, 4), "bn": nn.BatchNorm1d(4)})
        self.cls_token = nn.Parameter(nn.Linear(1, 4).bias.detach().clone())
        self.heads = nn.ModuleList([nn.Linear(4, 2)])


def test_one_group_takes_every_parameter_with_one_decay():
    plan = OptimizerPlan("sgd", {}, lr={}, weight_decay=0.1, head_weight_decay=0.5, grouping="single")
    (group,) = param_groups(Transformer(), plan)
    assert group.params == tuple(name for name, _ in Transformer().named_parameters())
    assert (group.weight_decay, group.is_decayed, group.is_head) == (0.1, True, False)


def test_dino_s_groups_are_biases_and_what_is_called_norm_and_the_rest():
    """https://github.com/facebookresearch/vissl/blob/main/vissl/optimizers/param_groups/dino.py"""
    plan = OptimizerPlan("sgd", {}, lr={}, weight_decay=0.1, regularize_bn=True, grouping="dino")
    decayed, others = param_groups(Transformer(), plan)
    assert decayed.params == ("cls_token", "trunk.fc.weight", "trunk.bn.weight", "heads.0.weight")
    assert set(others.params) == {
        "trunk.norm1.weight",
        "trunk.norm1.bias",
        "trunk.fc.bias",
        "trunk.bn.bias",
        "heads.0.bias",
    }
    assert (decayed.weight_decay, others.weight_decay, others.is_decayed) == (0.1, 0.0, False)


def test_dino_s_norms_are_so_by_name_or_by_layer():
    """VISSL's transformers call every layer norm "norm"; ours and timm's may not."""
    layers = {"ln1": nn.LayerNorm(4), "gn": nn.GroupNorm(2, 4), "bn": nn.BatchNorm1d(4)}
    model = nn.ModuleDict({"trunk": nn.ModuleDict({**layers, "normal": nn.Linear(4, 4), "fc": nn.Linear(4, 4)})})
    decayed, others = param_groups(model, OptimizerPlan("sgd", weight_decay=0.1, grouping="dino"))
    assert decayed.params == ("trunk.bn.weight", "trunk.fc.weight")
    assert {name for name in others.params if not name.endswith(".bias")} == {
        f"trunk.{name}.weight" for name in ("ln1", "gn", "normal")
    }


class Blocks(nn.Module):
    """A transformer in our names: embedding, three blocks, a norm after them."""

    def __init__(self):
        super().__init__()
        unit = lambda *layers: nn.ModuleDict({"unit": nn.Sequential(*layers)})  # noqa: E731
        self.trunk = nn.ModuleDict(
            {
                "embedding": nn.ModuleDict({"patch_embed": nn.Conv2d(3, 4, 1)}),
                "blocks": nn.ModuleList(unit(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)),
                "norm": nn.LayerNorm(4),
            }
        )
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))])


def rule(**keys):
    return {"match": "", "max_dims": None, "lr_factor": 1.0, "wd_factor": 1.0, "constant_lr": False, **keys}


def test_layer_decay_is_that_of_mae_and_beit():
    """Factors as lr_decay.py of facebookresearch/mae (be47fef) gives them for 3 blocks at 0.75: 0.75 ** (4 - layer)."""
    groups = param_groups(Blocks(), OptimizerPlan("adamw", weight_decay=0.05, layer_decay=0.75))
    factors = {name: group.lr_factor for group in groups for name in group.params}
    assert factors.keys() == {name for name, _ in Blocks().named_parameters()}
    assert factors["trunk.embedding.patch_embed.weight"] == factors["trunk.embedding.patch_embed.bias"] == 0.75**4
    assert [factors[f"trunk.blocks.{i}.unit.1.weight"] for i in range(3)] == [0.75**3, 0.75**2, 0.75]
    assert factors["trunk.blocks.1.unit.0.bias"] == 0.75**2
    assert {factors[name] for name in factors if name.startswith(("heads.", "trunk.norm."))} == {1.0}
    assert {g.weight_decay for g in groups if not g.is_decayed} == {0.0}
    assert len({g.name for g in groups}) == len(groups)


def test_the_first_entry_that_fits_counts_and_multiplies():
    rules = (rule(match="patch_embed", lr_factor=0.2, wd_factor=0.0), rule(max_dims=1, lr_factor=3.0, constant_lr=True))
    groups = param_groups(Blocks(), OptimizerPlan("sgd", weight_decay=0.1, layer_decay=0.5, param_rules=rules))
    of = {name: group for group in groups for name in group.params}
    embedding, bias = of["trunk.embedding.patch_embed.weight"], of["trunk.blocks.2.unit.1.bias"]
    assert (embedding.lr_factor, embedding.weight_decay, embedding.is_decayed) == (0.2 * 0.5**4, 0.0, False)
    assert of["trunk.embedding.patch_embed.bias"].lr_factor == 0.2 * 0.5**4
    assert (bias.lr_factor, bias.has_constant_lr, bias.weight_decay) == (3.0 * 0.5, True, 0.1)
    assert (of["heads.0.0.weight"].lr_factor, of["heads.0.0.weight"].has_constant_lr) == (1.0, False)


def test_what_fits_nothing_is_refused():
    rules = (rule(match="patch_embd"),)
    with pytest.raises(
        ConfigError, match=r"param_groups\[0\].*must fit a trained parameter.*Did you mean 'patch_embed'"
    ):
        param_groups(Blocks(), OptimizerPlan("sgd", param_rules=rules))
    several = (rule(match="norm"), rule(match="nothing"), rule(match="norm.", lr_factor=2.0))
    with pytest.raises(ConfigError, match=r"param_groups\[1\]"):
        param_groups(Blocks(), OptimizerPlan("sgd", param_rules=several))
    with pytest.raises(ConfigError, match=r"layer_decay.*needs a trunk with a list of blocks"):
        param_groups(Net(), OptimizerPlan("sgd", layer_decay=0.5))


def test_each_head_has_its_own_rate_and_decay():
    model = Net()
    model.heads.append(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    keys = ("lr", "weight_decay", "regularize_bn")
    heads = tuple(dict(zip(keys, values, strict=True)) for values in ((2.0, None, None), (3.0, 0.5, True)))
    found = groups_of(model, head_rules=heads, regularize_bias=True)
    facts = {name: (group.lr_factor, group.weight_decay, set(group.params)) for name, group in found.items()}
    assert [facts.pop(name)[:2] for name in ("trunk", "trunk_no_decay")] == [(1.0, 0.1), (1.0, 0.0)]
    norm = {"heads.0.1.weight", "heads.0.1.bias"}
    assert facts == {
        "head_0": (2.0, 0.1, {"heads.0.0.weight", "heads.0.0.bias", "heads.0.2.weight"}),
        "head_0_no_decay": (2.0, 0.0, norm),
        "head_1": (3.0, 0.5, {f"heads.1.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}),
    }
    rates = groups_of(model, head_lr_factors=(4.0, 5.0), regularize_bn=True, regularize_bias=True)
    assert {name: group.lr_factor for name, group in rates.items()} == {"trunk": 1.0, "head_0": 4.0, "head_1": 5.0}


class NormedBlock(nn.Module):
    """Called a norm, with a gain of its own and a layer inside."""

    def __init__(self):
        super().__init__()
        self.gain, self.inner = nn.Parameter(nn.Linear(1, 2).bias.detach()), nn.Linear(2, 2)


def test_a_layer_inside_a_norm_does_not_make_it_another_kind():
    assert is_norm(NormedBlock())
