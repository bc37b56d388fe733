"""Parameter groups by weight decay, head, depth and rule, from full names of the unwrapped model.

``build_optimizer`` builds the optimizer of this rank's shards from these groups and the plan.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from vissl_zero.collectives import rank
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.optim.adaptation import Adaptation, Larc
from vissl_zero.registry import OPTIMIZERS
from vissl_zero.resolve.resolved import OptimizerPlan
from vissl_zero.vissl.keys import ALIASES

_HEAD_PREFIX = "heads."
_BLOCK = re.compile(r"trunk\.(?:net\.)?blocks\.(\d+)\.")
_BIAS = re.compile(r"(^|_)bias(_|$)")
# _NormBase: batch norm and instance norm of every kind, torch's synchronized one and subclasses included.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay.

    Attributes:
        name: "trunk", "trunk_no_decay", "head" or "head_no_decay"; "head_<i>" if heads have different rates.
        params: full names, in the model's order.
        is_head: under ``heads.``; follows the head's schedules.
        is_decayed: follows the weight decay's schedule; other groups have 0.
        weight_decay: weight decay at the start; a schedule may change it.
        lr_factor: factor of the scheduled learning rate.
        wd_factor: factor of the scheduled weight decay; ``weight_decay`` includes it.
        has_constant_lr: keeps the largest value of the schedule.
    """

    name: str
    params: tuple[str, ...]
    is_head: bool
    is_decayed: bool
    weight_decay: float
    lr_factor: float = 1.0
    wd_factor: float = 1.0
    has_constant_lr: bool = False


def param_groups(model: nn.Module, plan: OptimizerPlan) -> list[ParamGroup]:
    """Sort every parameter with ``requires_grad`` into exactly one group, the same on every rank.

    There are at most four groups, and two more per head if heads have different rates. ``layer_decay`` and
    ``param_rules`` split them further.

    A parameter does not decay if its full name contains an entry of ``plan.non_regularized``, if it is a bias and
    ``regularize_bias`` is off, or if it belongs to a norm layer and ``regularize_bn`` is off (so a norm's bias needs
    both). A bias is a parameter called ``bias``, or with that component in its name (``in_proj_bias``, ``bias_hh_l0``).
    A tied parameter counts once, by the first of its names. Empty groups are dropped.

    Args:
        model: unwrapped model.
        plan: decay rules.
    Raises:
        ConfigError: no parameter is trainable, a rule matches no parameter, or ``layer_decay`` finds no blocks.
    """
    groups = _plain_groups(model, plan) if plan.grouping != "default" else _default_groups(model, plan)
    return _refined(groups, model, plan)


def _default_groups(model: nn.Module, plan: OptimizerPlan) -> list[ParamGroup]:
    _warn_of_unmatched(plan.non_regularized, model)
    heads = [f"head_{index}" for index in range(max(len(plan.head_lr_factors), len(plan.head_rules)))] or ["head"]
    members: dict[tuple[str, bool], list[str]] = {(part, d): [] for part in ("trunk", *heads) for d in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = model.get_submodule(name.rpartition(".")[0])
            members[_part(name, heads), _decays(name, module, plan)].append(name)
    groups = [_group(part, is_decayed, names, plan) for (part, is_decayed), names in members.items() if names]
    return _required(groups)


def _refined(groups: list[ParamGroup], model: nn.Module, plan: OptimizerPlan) -> list[ParamGroup]:
    """Split groups by block (``layer_decay``) and by rule (``param_rules``)."""
    if plan.layer_decay == 1 and not plan.param_rules:
        return groups
    depths = _depths_from_top(model, plan.layer_decay) if plan.layer_decay != 1 else {}
    num_dims = {name: parameter.ndim for name, parameter in model.named_parameters()}
    result, unused = list[ParamGroup](), set(range(len(plan.param_rules)))
    for group in groups:
        parts: dict[tuple[int, int], list[str]] = {}
        for name in group.params:
            rule = _rule_of(name, num_dims[name], plan.param_rules)
            unused.discard(rule)
            parts.setdefault((depths.get(name, 0), rule), []).append(name)
        for (depth, rule), names in parts.items():
            result.append(_part_of_group(group, depth, rule, names, plan))
    if unused:
        index = min(unused)
        got = ", ".join(f"{key}: {plan.param_rules[index][key]}" for key in ("match", "max_dims"))
        known = [part for name in num_dims for part in name.split(".")]
        fix = f"Correct it, or leave it out.{did_you_mean(plan.param_rules[index]['match'], known)}"
        must = "must fit a trained parameter that no entry before it does"
        raise ConfigError([Problem(f"config.OPTIMIZER.param_groups[{index}]", got, must, fix)])
    return result


def _part_of_group(group: ParamGroup, depth: int, rule: int, names: list[str], plan: OptimizerPlan) -> ParamGroup:
    rule_options = plan.param_rules[rule] if rule >= 0 else {}
    wd_factor = group.wd_factor * rule_options.get("wd_factor", 1.0)
    return replace(
        group,
        # Names must differ: the loop finds the rates of a group by its name.
        name=group.name + (f".below_{depth}" if depth else "") + (f".rule_{rule}" if rule_options else ""),
        params=tuple(names),
        is_decayed=group.is_decayed and wd_factor > 0,
        weight_decay=group.weight_decay * wd_factor,
        lr_factor=group.lr_factor * plan.layer_decay**depth * rule_options.get("lr_factor", 1.0),
        wd_factor=wd_factor,
        has_constant_lr=bool(rule_options.get("constant_lr", False)),
    )


def _rule_of(name: str, num_dims: int, rules: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the first matching rule; -1 if none matches."""
    for index, rule in enumerate(rules):
        if rule["match"] in name and (rule["max_dims"] is None or num_dims <= rule["max_dims"]):
            return index
    return -1


def _depths_from_top(model: nn.Module, layer_decay: float) -> dict[str, int]:
    """Return the exponent of ``layer_decay`` of a trunk's parameters: 1 in the last block, 2 in the one before, ...

    Parameters after the last block, and of heads, are not included: their exponent is 0. The exponents are those of
    https://github.com/facebookresearch/mae/blob/be47fef/util/lr_decay.py and of DINOv2's pre-training.
    """
    names = [name for name, _ in model.named_parameters() if name.startswith("trunk.")]
    blocks = {name: int(match[1]) for name in names if (match := _BLOCK.match(name))}
    if not blocks:
        must = "needs a trunk with a list of blocks, as vision transformers have"
        key = "config.OPTIMIZER.layer_decay"
        raise ConfigError(
            [Problem(key, f"{layer_decay:g}", must, f"Write {key}=1, or give rates by name in param_groups.")]
        )
    count = max(blocks.values()) + 1
    # By place, as names of embeddings differ between libraries, and all are registered before the blocks.
    before = names[: names.index(next(iter(blocks)))]
    return {name: count - block for name, block in blocks.items()} | dict.fromkeys(before, count + 1)


def _required(groups: list[ParamGroup]) -> list[ParamGroup]:
    if not groups:
        fix = "Leave at least one parameter out of it."
        raise ConfigError([Problem("config.MODEL.NON_TRAINABLE_PARAMS", "", "leaves nothing to train", fix)])
    return groups


def _plain_groups(model: nn.Module, plan: OptimizerPlan) -> list[ParamGroup]:
    """Group parameters regardless of heads: all in one (VISSL's construct_single_param_group_only), or DINO's two.

    DINO's groups: parameters whose full name ends in ``.bias`` or contains ``norm`` do not decay, as in
    https://github.com/facebookresearch/vissl/blob/main/vissl/optimizers/param_groups/dino.py.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    apart = {
        name for name in names if plan.grouping == "dino" and (name.endswith(".bias") or _is_norm_name(model, name))
    }
    members = {True: [name for name in names if name not in apart], False: [name for name in names if name in apart]}
    return _required([_group("trunk", is_decayed, params, plan) for is_decayed, params in members.items() if params])


def _is_norm_name(model: nn.Module, name: str) -> bool:
    """Check whether "norm" is in VISSL's name of the parameter, or the layer is a norm, which may have another name."""
    return "norm" in name or isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.LayerNorm, nn.GroupNorm))


def freeze_untrainable(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters of MODEL.NON_TRAINABLE_PARAMS for the whole run (``requires_grad = False``).

    Args:
        model: unwrapped model.
        names: full names of parameters, or of modules for all of their parameters; VISSL's ``module.`` prefix is
            allowed.
    Raises:
        ConfigError: a name is neither.
    """
    # Not named_parameters(): a tied parameter may be named by any of its names.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = [*parameters, *(name for name, _ in model.named_modules() if name)]
    problems = []
    for entry in names:
        wanted = entry.removeprefix("module.")
        matching = [p for name, p in parameters.items() if name == wanted or name.startswith(f"{wanted}.")]
        for parameter in matching:
            parameter.requires_grad_(False)
        if not matching:
            fix = f"Use a full name.{did_you_mean(wanted, known)}"
            must = "must name parameters or modules of the model"
            problems.append(Problem("config.MODEL.NON_TRAINABLE_PARAMS", repr(entry), must, fix))
    if problems:
        raise ConfigError(problems)


def is_norm(module: nn.Module) -> bool:
    """Check whether ``module`` is a norm layer, whose parameters scale and shift normalized values.

    Norm layers are torch's, subclasses included, and any class with "norm" in its name whose direct parameters have at
    most one dimension.
    """
    if isinstance(module, _NORMS):
        return True
    params = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and bool(params) and all(p.ndim <= 1 for p in params)


def _decays(name: str, module: nn.Module, plan: OptimizerPlan) -> bool:
    if any(part in name for part in plan.non_regularized):
        return False
    if not plan.regularize_bias and _BIAS.search(name.rpartition(".")[2]):
        return False
    head_rule = plan.head_rules[int(name.split(".")[1])] if plan.head_rules and name.startswith(_HEAD_PREFIX) else {}
    of_head = head_rule.get("regularize_bn")
    norms_decay = plan.regularize_bn if of_head is None else bool(of_head)
    return norms_decay or not is_norm(module)


def _part(name: str, heads: Sequence[str]) -> str:
    if not name.startswith(_HEAD_PREFIX):
        return "trunk"
    return heads[0] if len(heads) == 1 else heads[int(name.split(".")[1])]


def _group(part: str, is_decayed: bool, names: Iterable[str], plan: OptimizerPlan) -> ParamGroup:
    is_head = part != "trunk"
    weight_decay = plan.head_weight_decay if is_head else plan.weight_decay
    factor = plan.head_lr_factors[int(part.rpartition("_")[2])] if is_head and plan.head_lr_factors else 1.0
    if is_head and plan.head_rules:
        head_rule = plan.head_rules[int(part.rpartition("_")[2])]
        factor, weight_decay = (
            head_rule["lr"],
            plan.weight_decay if head_rule["weight_decay"] is None else head_rule["weight_decay"],
        )
    name = part + ("" if is_decayed else "_no_decay")
    return ParamGroup(name, tuple(names), is_head, is_decayed, weight_decay if is_decayed else 0.0, factor)


def _warn_of_unmatched(parts: Iterable[str], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    known = [name for name in parts if any(name in full for full in names)]
    # A recipe may list both names of one parameter, VISSL's and ours: only one can fit a model, and that is no mistake.
    twins = {ours for theirs, ours in ALIASES["parameters"].items() if theirs in known}
    twins |= {theirs for theirs, ours in ALIASES["parameters"].items() if ours in known}
    unmatched = [part for part in parts if part not in known and part not in twins]
    if unmatched and rank() == 0:
        logging.getLogger(__name__).warning(
            "config.OPTIMIZER.non_regularized_parameters: no parameter's name contains %s, so it has no effect.",
            " or ".join(map(repr, unmatched)),
        )


# The result of a component of OPTIMIZERS: an optimizer, alone or with its adaptation.
Built = torch.optim.Optimizer | tuple[torch.optim.Optimizer, Adaptation]


def build_optimizer(
    plan: OptimizerPlan, groups: list[dict[str, Any]]
) -> tuple[torch.optim.Optimizer, Adaptation | None]:
    """Build the base optimizer of ``plan`` over ``groups``, and LARC or LARS if the plan has them.

    A component is called as ``build(groups, **options)`` and returns a ``torch.optim.Optimizer`` whose update of a
    tensor depends on that tensor alone (``optim/update_rule.py`` finds out), alone or as a pair with an ``Adaptation``.
    It must honor each group's ``lr`` and ``weight_decay``, which schedules set before every step.

    Args:
        plan: name, options and LARC.
        groups: torch's, each with "params", "lr", "weight_decay" and any other keys, which are kept.
    Raises:
        ConfigError: the optimizer refuses its options, or LARC is asked for on top of an optimizer with its own.
    """
    component = OPTIMIZERS.get(plan.name)
    try:
        built: Built = component.build(groups, **plan.options)
    except ValueError as error:  # torch's optimizers raise it for wrong options
        key = "config.OPTIMIZER.base_optimizer"
        problem = Problem(key, str(plan.options), f"{plan.name} refuses its options: {error}", "Correct the value.")
        raise ConfigError([problem]) from error
    optimizer, adaptation = built if isinstance(built, tuple) else (built, None)
    if plan.larc is None:
        return optimizer, adaptation
    if adaptation is not None:
        must = f"LARC cannot be put on top of {plan.name}, which adapts its rates by layer itself"
        fix = "Set config.OPTIMIZER.use_larc=False, or use sgd as the base optimizer."
        raise ConfigError([Problem("config.OPTIMIZER.use_larc", "True", must, fix)])
    return optimizer, Larc(plan.larc.trust_coefficient, plan.larc.clip, plan.larc.eps)
