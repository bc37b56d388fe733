"""Optimizer state of VISSL's consolidated checkpoints, found again by parameter.

torch numbers optimizer state by the place of a parameter in the optimizer's groups. VISSL's groups follow from the
model and a few settings, which the file does not hold (vissl/optimizers/param_groups/default.py): weights of
convolutions and linear layers, with or without biases and norms, of the trunk and of whatever has "head" in its name;
then the rest. Here every way in which those settings can sort the parameters is tried. State is taken only if the
numbers and shapes of all groups fit one of them, and no two that fit would give a parameter different state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from vissl_zero.checkpoint.shard_file import Entry

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_KEYS_OF = {
    "sgd": frozenset({"momentum_buffer"}),
    "adam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}


@dataclass(frozen=True)
class OptimizerState:
    """State by parameter, or why there is none.

    Attributes:
        of: name of the parameter in the file -> key -> tensor or number.
        reason: why the state in the file is not taken; empty if it is, or if there is none.
    """

    of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reason: str = ""

    def fits(self, optimizer: str) -> bool:
        """Whether an optimizer of ours (``OPTIMIZER.name``) has this state."""
        return all(state.keys() == _KEYS_OF.get(optimizer) for state in self.of.values())


def optimizer_state(classy_state: Mapping[str, Any], entries: Sequence[Entry]) -> OptimizerState:
    """State of every parameter that has some.

    Args:
        classy_state: ``classy_state_dict`` of the file.
        entries: all tensors of the model, trunk first, in the order of its modules.
    """
    try:
        optim = classy_state["optimizer"]["optim"]
        groups = [tuple(group["params"]) for group in optim["param_groups"]]
        states = {number: _checked(state) for number, state in optim["state"].items()}
        hash(tuple(groups))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError):
        return OptimizerState(reason="the file holds none that torch's optimizers have written")
    if not any(states.values()):
        return OptimizerState(reason="the file holds none")
    if unknown := {key for state in states.values() for key in state} - set().union(*_KEYS_OF.values()):
        return OptimizerState(reason=f"{', '.join(sorted(unknown))}: not state of SGD, Adam or AdamW")
    found: list[dict[str, Any]] = []
    for sorting in _sortings(entries):
        taken = _take(sorting, groups, states)
        if taken is not None and not any(_is_same(taken, other) for other in found):
            found.append(taken)
    if len(found) != 1:
        fits = "fit no order in which VISSL sorts" if not found else "fit more than one order of"
        return OptimizerState(reason=f"its numbers, which stand for parameters, {fits} the parameters of this model")
    return OptimizerState({name: state for name, state in found[0].items() if state})


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors, and the number of steps as a number; the None that SGD without momentum keeps is left out.

    Raises:
        ValueError, TypeError, AttributeError, RuntimeError: it is something else.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "step":
            found[key] = float(value)
        elif value is not None:
            if not isinstance(key, str) or value.layout != torch.strided or value.is_quantized:
                raise ValueError
            found[key] = value.detach()
    return found


def _sortings(entries: Sequence[Entry]) -> Iterator[list[list[Entry]]]:
    """Groups of parameters, for all settings that sort them."""
    params = [entry for entry in entries if not entry.key.endswith(_BUFFERS)]
    trained_heads = [entry for entry in params if entry.key.startswith("heads.")]
    yield [params]  # construct_single_param_group_only
    flags = (False, True)
    for chosen, bias, norm, is_layer_norm in product((params, trained_heads), flags, flags, flags):
        yield _default_groups(chosen, entries, bias, norm, is_layer_norm)


def _default_groups(
    params: Sequence[Entry], entries: Sequence[Entry], bias: bool, norm: bool, is_layer_norm: bool
) -> list[list[Entry]]:
    """VISSL's ``default``: trunk with and without decay, heads with and without decay, and the rest, if there is any.

    Args:
        params: those that are trained.
        entries: all tensors.
        bias, norm: whether they decay (``regularize_bias``, ``regularize_bn``).
        is_layer_norm: norms without running statistics are layer norms, which count as norms; else group norms.
    """
    keys = {entry.key for entry in entries}
    groups: list[list[Entry]] = [[], [], [], [], []]
    modules: dict[str, dict[str, Entry]] = {}
    for entry in params:
        module, _, name = entry.key.rpartition(".")
        modules.setdefault(module, {})[name] = entry
    for module, own in modules.items():
        first = 2 if "head" in module else 0
        weight = own.get("weight")
        is_layer = "weight_v" in own or (weight is not None and len(weight.shape) > 1)
        is_norm = f"{module}.running_mean" in keys or (is_layer_norm and weight is not None and len(weight.shape) == 1)
        if not is_layer and not is_norm:
            groups[4] += own.values()
            continue
        for name in ("weight_g", "weight_v", "weight", "bias"):
            decays = norm if is_norm else True
            if name == "bias":
                # As in VISSL's default.py: the bias of a norm decays only where both flags allow it.
                decays = bias and (norm or not is_norm)
            if name in own:
                groups[first + (not decays)].append(own[name])
    return groups if groups[4] else groups[:4]


def _take(
    sorting: list[list[Entry]], groups: list[tuple[Any, ...]], states: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """State by name if the groups of the file are those of ``sorting``; else None."""
    if [len(group) for group in sorting] != [len(group) for group in groups]:
        return None
    taken, rest = {}, dict(states)
    for entries, numbers in zip(sorting, groups, strict=True):
        for entry, number in zip(entries, numbers, strict=True):
            if (state := rest.pop(number, None)) is None:
                continue
            if any(tuple(value.shape) != entry.shape for key, value in state.items() if key != "step"):
                return None
            taken[entry.key] = state
    # State that no parameter has taken shows that this is not the file's order.
    return None if rest else taken


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
