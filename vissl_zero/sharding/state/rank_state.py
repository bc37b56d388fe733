"""This rank's training state as one dict, to resume under the same layout.

``{"layout": {...}, "params": {name: entry}, "optimizer": {"groups": [...], "state": {name: {key: entry or number}}},
"buffers": {name: tensor}, "loss_scale": {...} or None, "average": {"params": {name: entry}, "buffers": {name: tensor}}
or None}``, where an entry is ``{"local": tensor, "first_element": int, "full_shape": tuple}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.errors import CheckpointError
from vissl_zero.optim.elementwise import complete_state
from vissl_zero.optim.update_rule import element_keys
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer
from vissl_zero.sharding.state.saved_state import (
    SAME_SCALING,
    check_names,
    check_optimizer,
    check_same_update,
    group_facts,
    inner_optimizer,
    state_shards,
    take_group_options,
)
from vissl_zero.sharding.state.shard import Shard, empty_state
from vissl_zero.sharding.state.teacher import WeightAverage
from vissl_zero.sharding.update.whole_tensors import WholeTensorOptimizer


def rank_state(
    plan: ShardingPlan,
    shards: Mapping[str, Shard],
    optimizer: torch.optim.Optimizer,
    buffers: Mapping[str, Tensor],
    loss_scale: LossScale | None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Collect this rank's state; tensors are shared with it, not copied. Not a collective."""
    owned = state_shards(shards, optimizer)
    names = {id(shard.local): name for name, shard in owned.items()}
    state: dict[str, dict[str, Any]] = {}
    for param, values in optimizer.state.items():
        shard = owned[names[id(param)]]
        state[shard.name] = {key: _entry(shard, value) for key, value in values.items()}
    averages = None
    if average is not None:
        averaged = {name: _entry(shards[name], tensor) for name, tensor in average.params.items()}
        averages = {"params": averaged, "buffers": dict(average.buffers)}
    return {
        "layout": layout_of(plan),
        "params": {name: _entry(shard, shard.values()) for name, shard in shards.items()},
        "optimizer": {"groups": group_facts(shards, optimizer), "state": state},
        "buffers": dict(buffers),
        "loss_scale": loss_scale.state_dict() if loss_scale else None,
        "average": averages,
    }


@torch.no_grad()
def load_rank_state(
    state: Mapping[str, Any],
    plan: ShardingPlan,
    shards: Mapping[str, Shard],
    optimizer: torch.optim.Optimizer,
    buffers: Mapping[str, Tensor],
    loss_scale: LossScale | None,
) -> None:
    """Restore a state that ``rank_state`` returned on a rank of the same layout.

    Raises:
        CheckpointError: the state is of another layout or another model; nothing was changed.
    """
    # All checks come before the first write: a refused state must change nothing.
    _check_layout(state["layout"], plan)
    _check_model(state, shards, buffers)
    names_there, names_here = (
        [group["params"] for group in groups]
        for groups in (state["optimizer"]["groups"], group_facts(shards, optimizer))
    )
    if names_there != names_here:
        raise CheckpointError("The saved optimizer groups parameters differently. Use the same decay rules and head.")
    if (loss_scale is None) != (state["loss_scale"] is None):
        raise CheckpointError(f"The saved state and this run differ in loss scaling. {SAME_SCALING}")
    check_optimizer(state["optimizer"]["state"], names_here, optimizer)
    check_same_update(state["optimizer"]["groups"], optimizer)
    for name, shard in shards.items():
        shard.assign(state["params"][name]["local"])
    for name, buffer in buffers.items():
        buffer.copy_(state["buffers"][name])
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
        take_group_options(group, saved)
    optimizer.state.clear()
    for name, values in state["optimizer"]["state"].items():
        local = state_shards(shards, optimizer)[name].local
        optimizer.state[local] = {key: _value(value, local) for key, value in values.items()}
    if not isinstance(optimizer, StreamedOptimizer):
        complete_state(inner_optimizer(optimizer))
    if loss_scale is not None:
        loss_scale.load_state_dict(state["loss_scale"])


@torch.no_grad()
def load_torch_state(state: Mapping[str, Any], shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's elements of optimizer state that plain torch saved (``{"state": ..., "param_groups": ...}``).

    Parameters do not change. Not a collective, but every rank needs the same complete ``state``.

    Raises:
        CheckpointError: the state is of another optimizer, or has other groups or shapes; nothing was changed.
    """
    if isinstance(optimizer, StreamedOptimizer):
        raise CheckpointError(
            "Optimizer state of plain torch cannot be loaded where state is offloaded to NVMe, or parameters are in "
            "bfloat16 (rounding)."
        )
    names = [group["params"] for group in group_facts(shards, optimizer)]
    # torch saves parameters by number, in the order of the groups.
    numbers = [group["params"] for group in state["param_groups"]]
    sizes, saved_sizes = list(map(len, names)), list(map(len, numbers))
    if sizes != saved_sizes:
        raise CheckpointError(
            f"The saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}. "
            "Build the optimizer that is given to initialize() like the saved one."
        )
    pairs = [
        pair
        for group_names, group_numbers in zip(names, numbers, strict=True)
        for pair in zip(group_names, group_numbers, strict=True)
    ]
    saved = {name: state["state"][number] for name, number in pairs if number in state["state"]}
    held = {name: [k for k, v in saved_state.items() if v is not None] for name, saved_state in saved.items()}
    check_optimizer(held, names, optimizer)
    check_same_update(state["param_groups"], optimizer)
    owned = state_shards(shards, optimizer)
    per_element = element_keys(inner_optimizer(optimizer))
    for name, saved_state in saved.items():
        for key in per_element & saved_state.keys():
            if tuple(saved_state[key].shape) != tuple(shards[name].full_shape):
                raise CheckpointError(
                    f"{key!r} of {name} has shape {tuple(saved_state[key].shape)} in the saved optimizer, and the "
                    f"parameter {tuple(shards[name].full_shape)}. Load state of the same model."
                )
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        # torch numbers parameters where this package names them, so only options are taken over.
        group.update({key: value for key, value in saved_group.items() if key not in ("params", "param_names", "name")})
    optimizer.state.clear()
    for name, saved_state in saved.items():
        # Under WholeTensorOptimizer one rank owns each tensor, and the others keep no state of it.
        if name not in owned:
            continue
        shard = owned[name]
        optimizer.state[shard.local] = {
            key: _elements_of(shard, value) if key in per_element else _value(value, shard.local)
            for key, value in saved_state.items()
        }
    if not isinstance(optimizer, WholeTensorOptimizer):
        complete_state(inner_optimizer(optimizer))


def _elements_of(shard: Shard, whole: Tensor) -> Tensor:
    """Copy this rank's elements of ``whole``, which has the shape of the parameter."""
    run = whole.reshape(-1)[shard.first_element : shard.first_element + shard.local.numel()]
    dtype = shard.local.dtype if whole.is_floating_point() else whole.dtype
    return empty_state(shard.local, shard.local.shape, dtype).copy_(run.view(shard.local.shape))


def layout_of(plan: ShardingPlan) -> dict[str, Any]:
    """Return how the state is cut on this rank."""
    return {
        "engine": plan.engine,
        "level": plan.level,
        "shard_group_size": plan.shard_group_size,
        "world_size": collectives.world_size(),
        "rank": collectives.rank(),
    }


def _entry(shard: Shard, value: Any) -> Any:
    """Return a tensor that is cut like the parameter with its position; anything else (a step counter) unchanged."""
    if not isinstance(value, Tensor) or value.shape != shard.local.shape:
        return value
    return {"local": value, "first_element": shard.first_element, "full_shape": tuple(shard.full_shape)}


def _value(entry: Any, local: Tensor) -> Any:
    if isinstance(entry, dict):
        values = entry["local"]
        # In the parameter's memory format, which fused kernels need; the saved tensor may have another.
        return empty_state(local, values.shape, values.dtype).copy_(values)
    # A copy: the optimizer counts up in place, and the saved dict may be loaded again.
    return entry.clone() if isinstance(entry, Tensor) else entry


def _check_layout(saved: Mapping[str, Any], plan: ShardingPlan) -> None:
    here = layout_of(plan)
    if differing := [key for key in here if here[key] != saved.get(key)]:
        facts = ", ".join(f"{key} {saved.get(key)} (here {here[key]})" for key in differing)
        raise CheckpointError(f"This state was saved with another layout: {facts}. Resume with the same settings.")


def _check_model(state: Mapping[str, Any], shards: Mapping[str, Shard], buffers: Mapping[str, Tensor]) -> None:
    check_names("parameters", state["params"], shards)
    check_names("buffers", state["buffers"], buffers)
    for name, shard in shards.items():
        if (saved := tuple(state["params"][name]["full_shape"])) != tuple(shard.full_shape):
            raise CheckpointError(f"{name} has shape {saved} in the saved state and {tuple(shard.full_shape)} here.")
