"""This rank's training state as one dict, to go on under the same layout.

``{"layout": {...}, "params": {name: entry}, "optimizer": {"groups": [...], "state": {name: {key: entry or number}}},
"buffers": {name: tensor}, "loss_scale": {...} or None, "average": {"params": {name: entry}, "buffers": {name: tensor}}
or None}``, where an entry is ``{"local": tensor, "first_element": int, "full_shape": tuple}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.average import WeightAverage
from vissl_zero.sharding.loss_scale import LossScale
from vissl_zero.sharding.shard import Shard
from vissl_zero.sharding.state import check_names, check_optimizer, check_same_update, group_facts


def rank_state(
    plan: ShardingPlan,
    shards: Mapping[str, Shard],
    optimizer: torch.optim.Optimizer,
    buffers: Mapping[str, Tensor],
    loss_scale: LossScale | None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """This rank's state; tensors are shared with it, not copied. Not a collective."""
    names = {id(shard.local): name for name, shard in shards.items()}
    state: dict[str, dict[str, Any]] = {}
    for param, values in optimizer.state.items():
        shard = shards[names[id(param)]]
        state[shard.name] = {key: _entry(shard, value) for key, value in values.items()}
    return {
        "layout": layout_of(plan),
        "params": {name: _entry(shard, shard.values()) for name, shard in shards.items()},
        "optimizer": {"groups": group_facts(shards, optimizer), "state": state},
        "buffers": dict(buffers),
        "loss_scale": loss_scale.state_dict() if loss_scale else None,
        "average": None if average is None else _averages(average, shards),
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
    """Restore what ``rank_state`` gave to a rank of the same layout.

    Raises:
        CheckpointError: it comes from another layout or another model; nothing was changed.
    """
    _check_layout(state["layout"], plan)
    _check_model(state, shards, buffers)
    _check_groups(state["optimizer"]["groups"], group_facts(shards, optimizer))
    if (loss_scale is None) != (state["loss_scale"] is None):
        raise CheckpointError("The saved state and this run differ in loss scaling. Use the same AMP settings.")
    check_optimizer(state["optimizer"]["state"], optimizer)
    check_same_update(state["optimizer"]["groups"], optimizer.param_groups)
    for name, shard in shards.items():
        shard.assign(state["params"][name]["local"])
    for name, buffer in buffers.items():
        buffer.copy_(state["buffers"][name])
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    for name, values in state["optimizer"]["state"].items():
        local = shards[name].local
        optimizer.state[local] = {key: _value(value, local) for key, value in values.items()}
    if loss_scale is not None:
        loss_scale.load_state_dict(state["loss_scale"])


def _averages(average: WeightAverage, shards: Mapping[str, Shard]) -> dict[str, Any]:
    params = {name: _entry(shards[name], tensor) for name, tensor in average.params.items()}
    return {"params": params, "buffers": dict(average.buffers)}


def layout_of(plan: ShardingPlan) -> dict[str, Any]:
    """How the state is cut on this rank."""
    return {
        "engine": plan.engine,
        "level": plan.level,
        "shard_group_size": plan.shard_group_size,
        "world_size": collectives.world_size(),
        "rank": collectives.rank(),
    }


def _entry(shard: Shard, value: Any) -> Any:
    """A tensor that is cut like the parameter, with its place; anything else (a step counter) as it is."""
    if not isinstance(value, Tensor) or value.shape != shard.local.shape:
        return value
    return {"local": value, "first_element": shard.first_element, "full_shape": tuple(shard.full_shape)}


def _value(entry: Any, local: Tensor) -> Any:
    if isinstance(entry, dict):
        return entry["local"].to(device="cpu" if local.is_meta else local.device, copy=True)
    return entry.clone() if isinstance(entry, Tensor) else entry


def _check_layout(there: Mapping[str, Any], plan: ShardingPlan) -> None:
    here = layout_of(plan)
    if differing := [key for key in here if here[key] != there.get(key)]:
        facts = ", ".join(f"{key} {there.get(key)} (here {here[key]})" for key in differing)
        raise CheckpointError(f"This state was saved with another layout: {facts}. Resume with the same settings.")


def _check_model(state: Mapping[str, Any], shards: Mapping[str, Shard], buffers: Mapping[str, Tensor]) -> None:
    check_names("parameters", state["params"], shards)
    check_names("buffers", state["buffers"], buffers)
    for name, shard in shards.items():
        if (saved := tuple(state["params"][name]["full_shape"])) != tuple(shard.full_shape):
            raise CheckpointError(f"{name} has shape {saved} in the saved state and {tuple(shard.full_shape)} here.")


def _check_groups(there: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> None:
    if [group["params"] for group in there] != [group["params"] for group in here]:
        raise CheckpointError("The saved optimizer groups parameters differently. Use the same decay rules and head.")
