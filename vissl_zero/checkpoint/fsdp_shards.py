"""Full tensors from the shards that fairscale's FullyShardedDataParallel saves: what ``local_state_dict`` and
``local_metadata_dict`` of every rank hold (the layout: fairscale/nn/data_parallel/fully_sharded_data_parallel.py,
in its form since 0.4 and the one before).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import is_plain_tensor
from vissl_zero.errors import CheckpointError


@dataclass(frozen=True)
class _Group:
    """Parameters that one tensor holds, one after the other: those of a flattened unit, or a single one.

    Attributes:
        key: of that tensor in a rank's state.
        names, shapes: of the parameters.
        padding: elements at the end of each rank's part that mean nothing.
        is_whole: every rank has all of it.
    """

    key: str
    names: list[str]
    shapes: list[tuple[int, ...]]
    padding: list[int]
    is_whole: bool


def full_tensors(states: Sequence[Mapping[str, Tensor]], metadata: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Parameters, each put together when it is read, and buffers as rank 0 has them.

    Args:
        states: ``local_state_dict`` of every rank, in order.
        metadata: ``local_metadata_dict`` of every rank.
    Raises:
        CheckpointError: they do not fit together.
    """
    try:
        entries = [entry for group in _groups(metadata) for entry in _entries(group, states)]
        for source, target in _shared(metadata[0]):
            found = next(entry for entry in entries if entry.key == source)
            entries.append(Entry(target, found.dtype, found.shape, found.read))
        names = {entry.key for entry in entries}
        buffers = {name: states[0][name] for name in metadata[0]["buffer_names"] if name not in names}
        if not all(is_plain_tensor(buffer) for buffer in buffers.values()):
            raise TypeError("a buffer is not a plain tensor")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration) as error:
        raise CheckpointError(f"The shards lack what fairscale writes ({type(error).__name__}: {error}).") from error
    return entries + [Entry.of(name, buffer) for name, buffer in buffers.items()]


def _groups(metadata: Sequence[Mapping[str, Any]]) -> list[_Group]:
    groups = []
    for index, unit in enumerate(metadata[0]["param_metadata"]):
        of_ranks = [rank["param_metadata"][index] for rank in metadata]
        groups += _groups_of_unit(unit, of_ranks) if "params" in unit else _old_groups_of_unit(unit, of_ranks)
    return groups


def _groups_of_unit(unit: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]) -> list[_Group]:
    path, is_whole = unit["fsdp_path"], bool(unit["no_broadcast_optim_state"])
    return [
        _Group(
            _join(path, key),
            [_join(path, name) for name in facts["names"]],
            [tuple(shape) for shape in facts["shapes"]],
            [int(rank["params"][key]["padding"]) for rank in of_ranks],
            is_whole,
        )
        for key, facts in unit["params"].items()
    ]


def _old_groups_of_unit(unit: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]) -> list[_Group]:
    """Before fairscale 0.4: one flat tensor called ``flat_param_0``, or one tensor for each parameter."""
    path, names = unit["fsdp_path"], list(unit["param_names"])
    shapes = [tuple(shape) for shape in unit["param_shapes"]]
    paddings = [[int(count) for count in rank["num_padded"]] for rank in of_ranks]
    if unit["is_flat"]:
        keys, members = ["flat_param_0"], [(names, shapes)]
    else:
        keys, members = names, [([name], [shape]) for name, shape in zip(names, shapes, strict=True)]
    return [
        _Group(_join(path, key), [_join(path, name) for name in own], its, [rank[i] for rank in paddings], False)
        for i, (key, (own, its)) in enumerate(zip(keys, members, strict=True))
    ]


def _entries(group: _Group, states: Sequence[Mapping[str, Tensor]]) -> list[Entry]:
    parts = []
    for state, padding in zip(states, group.padding, strict=True):
        if not is_plain_tensor(state[group.key]):
            raise CheckpointError(f"The shards of {group.key} are not plain tensors.")
        part = state[group.key].detach().reshape(-1)
        if not 0 <= padding <= part.numel():
            raise CheckpointError(f"The shards of {group.key} have impossible padding.")
        # fairscale pads the last ranks' parts, so that all parts have one length.
        parts.append(part[: part.numel() - padding])
        if group.is_whole:
            break
    if any(part.dtype != parts[0].dtype for part in parts):
        raise CheckpointError(f"The shards of {group.key} have different types.")
    if not all(type(size) is int and size >= 0 for shape in group.shapes for size in shape):
        raise CheckpointError(f"The parameters of {group.key} have impossible shapes.")
    sizes = [prod(shape) for shape in group.shapes]
    have = sum(part.numel() for part in parts)
    if sum(sizes) != have:
        raise CheckpointError(
            f"The shards of {group.key} hold {have} elements, its parameters {sum(sizes)}: a shard is missing or of "
            "another checkpoint."
        )
    dtype, first, entries = parts[0].dtype, 0, []
    for name, shape, size in zip(group.names, group.shapes, sizes, strict=True):
        entries.append(Entry(name, dtype, shape, partial(_gather, parts, first, size, shape)))
        first += size
    return entries


def _gather(parts: Sequence[Tensor], first: int, size: int, shape: tuple[int, ...]) -> Tensor:
    """Elements of the parts laid end to end."""
    found, start = [], 0
    for part in parts:
        begin, end = max(first - start, 0), min(first + size - start, part.numel())
        if begin < end:
            found.append(part[begin:end])
        start += part.numel()
    return torch.cat(found).view(shape) if found else torch.empty(shape, dtype=parts[0].dtype)


def _shared(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [pair for unit in metadata["param_metadata"] for pair in unit.get("shared_param_info", ())]
    return [(str(source), str(target)) for source, target in pairs]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
