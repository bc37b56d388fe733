"""State of the loss and the optimizer in VISSL's checkpoints: teachers, queues, memory banks, centers, clusters.

VISSL stores ``task.loss.state_dict()`` under ``loss``, next to ``classy_state_dict`` or in it
(vissl/hooks/log_hooks.py at 09270ed2). It stores only the first process's state. Each process has a part of SwAV's
queue and of DeepCluster's memory; the other parts are lost, as when VISSL itself resumes.

Optimizer state of consolidated checkpoints is matched with parameters as follows. torch numbers optimizer state by the
position of a parameter in the optimizer's groups. VISSL's groups follow from the model and a few settings, which are
not in the file (vissl/optimizers/param_groups/default.py): weights of convolutions and linear layers, with or without
biases and norms, of the trunk and of modules with "head" in their name; then the rest. All combinations of these
settings are tried. State is imported only if counts and shapes of all groups match a combination, and all matching
combinations agree.

Sharded checkpoints have the results of ``local_state_dict`` and ``local_metadata_dict`` of fairscale's
FullyShardedDataParallel on every rank (fairscale/nn/data_parallel/fully_sharded_data_parallel.py, in its layouts before
and since 0.4). Full tensors are assembled from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import is_plain_tensor
from vissl_zero.errors import CheckpointError
from vissl_zero.methods.method import Method, build_method

_TEACHER = re.compile(r"(?:momentum_teacher|momentum_encoder|moco_encoder)\.(?:module\.)?")


@dataclass
class LossState:
    """The state of the loss in a checkpoint of VISSL.

    Attributes:
        teacher: tensors of the momentum teacher under VISSL's names (``trunk...``, ``heads...``).
        tensors: all other tensors by VISSL's names; names of iBOT's inner criterion begin with ``criterion.``.
    """

    teacher: list[Entry] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def loss_state(contents: Sequence[Mapping[str, Any]]) -> LossState:
    """Return the state of the loss in a checkpoint of VISSL.

    Args:
        contents: contents of the file, or of each shard in order.
    Raises:
        CheckpointError: the shards of the teacher are incomplete or do not match.
    """
    states = [_of(content) for content in contents]
    first, loaded = states[0], LossState()
    named = {name: value for name, value in first.items() if isinstance(name, str)}
    if isinstance(named.get("teacher_meta"), Mapping):
        if not all(isinstance(state.get("teacher"), Mapping) for state in states):
            raise CheckpointError("The shards lack parts of the teacher.")
        loaded.teacher = full_tensors([state["teacher"] for state in states], [s["teacher_meta"] for s in states])
    elif isinstance(named.get("teacher"), Mapping):
        # DistributedDataParallel's prefix.
        plain = {str(name).removeprefix("module."): value for name, value in named["teacher"].items()}
        loaded.teacher = [Entry.of(name, value.detach()) for name, value in plain.items() if is_plain_tensor(value)]
    inner = named.get("criterion")
    named |= {f"criterion.{name}": value for name, value in inner.items()} if isinstance(inner, Mapping) else {}
    for name, value in named.items():
        if not is_plain_tensor(value):
            continue
        if match := _TEACHER.match(name):
            loaded.teacher.append(Entry.of(name[match.end() :], value.detach()))
        else:
            loaded.tensors[name] = value.detach()
    return loaded


def _of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    classy = content.get("classy_state_dict")
    inner = classy.get("loss") if isinstance(classy, Mapping) else None
    for state in (content.get("loss"), inner):
        if isinstance(state, Mapping) and state:
            return state
    return {}


def method_of(loss_config: Mapping[str, Any], state: LossState) -> Method | None:
    """Build the method of a resolved ``LOSS`` block, with the number of images in the state.

    None if the method has a memory of images, and the state does not show their number.
    """
    remembered = [state.tensors.get("nce_average.memory"), state.tensors.get("assignments")]
    sizes = [tensor.shape[0 if index == 0 else -1] for index, tensor in enumerate(remembered) if tensor is not None]
    method = build_method(loss_config)
    if method.remembers_images:
        if not sizes:
            return None
        method.set_images(sizes[0])
    return method


def as_ours(method: Method, loss_config: Mapping[str, Any], state: LossState) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state of ``method``: VISSL's tensors if the file has them, else the initial ones.

    Args:
        method: result of ``method_of``.
        loss_config: the resolved ``LOSS`` block.
        state: state in the file.
    Returns:
        Tensors by the names here, and sentences about what was imported and what was not.
    """
    ours = {name: value.clone() for name, value in method.state_dict().items() if isinstance(value, Tensor)}
    sentences: list[str] = []
    done: list[str] = []
    taken = _translated(str(loss_config["name"]), loss_config, state.tensors, ours)
    for name, value in taken.items():
        if name not in ours:
            continue
        if tuple(value.shape) != tuple(ours[name].shape):
            shapes = f"{tuple(value.shape)} in the file, {tuple(ours[name].shape)} here"
            sentences.append(f"The loss's {name} is not imported: its shape is {shapes}. It starts from scratch.")
            continue
        ours[name] = value.to(ours[name].dtype).clone()
        done.append(name)
    if done:
        sentences.insert(0, f"State of the loss is imported: {', '.join(sorted(done))}.")
    elif ours and not sentences:
        sentences.append(f"The file has no state of the loss: {', '.join(sorted(ours))} start from scratch.")
    return ours, sentences


def _translated(
    loss: str, config: Mapping[str, Any], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert tensors of a VISSL loss to the names and layouts of ours."""
    translated: dict[str, Tensor] = {}
    for name, place in (("center", "center.mean"), ("criterion.center", "center.mean")):
        if name in theirs:
            translated[place] = theirs[name].flatten()
    if "criterion.center2" in theirs:
        translated["patch_center.mean"] = theirs["criterion.center2"].flatten()
    if loss == "moco_loss" and "queue" in theirs:
        translated["queue.keys"] = theirs["queue"].T  # VISSL has one key per column
        if "queue_ptr" in theirs:
            translated["queue.position"] = theirs["queue_ptr"].flatten()[0]
    if "nce_average.memory" in theirs:
        translated["bank.memory"] = theirs["nce_average.memory"]
        if "nce_average.params" in theirs:  # negatives, temperature, Z, momentum
            normalizer = theirs["nce_average.params"].flatten()[2]
            # VISSL stores -1 until the constant is estimated, in the first batch.
            translated["bank.normalizer"], translated["bank._extra_state"] = normalizer, normalizer > 0
    if "local_memory_embeddings" in theirs and "memory.embeddings" in ours:
        translated |= _clusters(theirs, ours)
    if "local_emb_queue" in theirs and "queue.embeddings" in ours:
        translated |= _queue(theirs, ours, (config.get(loss) or {}).get("queue") or {})
    return translated


def _queue(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the first process's part of SwAV's queue; empty before ``start_iter``."""
    # Before ``start_iter`` VISSL's queue has only its random initial values.
    rows, queue = theirs["local_emb_queue"], ours["queue.embeddings"].clone()
    steps = theirs.get("num_iteration", torch.tensor(0)).flatten()[0]
    count = min(rows.shape[1], queue.shape[1])
    if int(steps) <= options.get("start_iter", 0) or rows.shape[0] != queue.shape[0] or rows.shape[2] != queue.shape[2]:
        return {}
    queue[:, :count] = rows[:, :count]
    return {"queue.embeddings": queue, "queue._extra_state": torch.tensor(count)}


def _clusters(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first process's part of DeepCluster's memory, and the clusters of all images."""
    is_global = re.compile(r"assignments|centroids\d+").fullmatch
    memory_state = {f"memory.{name}": value for name, value in theirs.items() if is_global(name)}
    rows, index = theirs["local_memory_embeddings"], theirs.get("local_memory_index")
    memory, known = ours["memory.embeddings"].clone(), ours["memory.is_known"].clone()
    if index is not None and rows.shape[0] == memory.shape[0] and rows.shape[2] == memory.shape[2]:
        # Rows of 0 are of images that the process had not seen yet.
        kept = (rows.norm(dim=2) > 0).all(dim=0) & (index < memory.shape[1])
        memory[:, index[kept]] = rows[:, kept].to(memory.dtype)
        known[index[kept]] = True
        memory_state |= {"memory.embeddings": memory, "memory.is_known": known}
    return memory_state


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_KEYS_OF = {
    "sgd": frozenset({"momentum_buffer"}),
    "adam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state by parameter, or the reason why there is none.

    Attributes:
        of: name of the parameter in the file -> key -> tensor or number.
        reason: reason why the state in the file is not imported; empty if it is.
    """

    of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reason: str = ""

    def fits(self, optimizer: str) -> bool:
        """Check whether an optimizer (``OPTIMIZER.name``) has state with these keys."""
        return all(state.keys() == _KEYS_OF.get(optimizer) for state in self.of.values())


def optimizer_state(classy_state: Mapping[str, Any], entries: Sequence[Entry]) -> OptimizerState:
    """Return the optimizer state of every parameter that has state.

    Args:
        classy_state: ``classy_state_dict`` of the file.
        entries: all tensors of the model, trunk first, in the order of its modules.
    """
    try:
        optim = classy_state["optimizer"]["optim"]
        groups = [tuple(group["params"]) for group in optim["param_groups"]]
        states = {number: _checked(state) for number, state in optim["state"].items()}
        # Numbers of parameters serve as keys below. Lists among them would fail there, outside this ``try``.
        hash(tuple(groups))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError):
        return OptimizerState(reason="the file holds none that torch's optimizers have written")
    if not any(states.values()):
        return OptimizerState(reason="the file holds none")
    if unknown := {key for state in states.values() for key in state} - set().union(*_KEYS_OF.values()):
        return OptimizerState(reason=f"{', '.join(sorted(unknown))}: not state of SGD, Adam or AdamW")
    checked: list[dict[str, Any]] = []
    for sorting in _sortings(entries):
        taken = _take(sorting, groups, states)
        if taken is not None and not any(_is_same(taken, other) for other in checked):
            checked.append(taken)
    if len(checked) != 1:
        fits = "fit no order in which VISSL sorts" if not checked else "fit more than one order of"
        return OptimizerState(reason=f"its numbers, which stand for parameters, {fits} the parameters of this model")
    return OptimizerState({name: state for name, state in checked[0].items() if state})


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's state with detached tensors, the step as a number, and without None.

    Raises:
        ValueError, TypeError, AttributeError, RuntimeError: the state has other values.
    """
    checked: dict[str, Any] = {}
    for key, value in state.items():
        if key == "step":
            checked[key] = float(value)
        elif value is not None:  # SGD without momentum stores None
            if not isinstance(key, str) or value.layout != torch.strided or value.is_quantized:
                raise ValueError
            checked[key] = value.detach()
    return checked


def _sortings(entries: Sequence[Entry]) -> Iterator[list[list[Entry]]]:
    """Yield the groups of parameters for each combination of VISSL's settings."""
    params = [entry for entry in entries if not entry.key.endswith(_BUFFERS)]
    trained_heads = [entry for entry in params if entry.key.startswith("heads.")]
    yield [params]  # construct_single_param_group_only
    flags = (False, True)
    for chosen, bias, norm, is_layer_norm in product((params, trained_heads), flags, flags, flags):
        yield _default_groups(chosen, entries, bias, norm, is_layer_norm)


def _default_groups(
    params: Sequence[Entry], entries: Sequence[Entry], bias: bool, norm: bool, is_layer_norm: bool
) -> list[list[Entry]]:
    """Return VISSL's groups ``default``: trunk with and without decay, heads with and without decay, and the rest.

    Args:
        params: trained parameters.
        entries: all tensors of the model.
        bias, norm: biases and norms decay (``regularize_bias``, ``regularize_bn``).
        is_layer_norm: norms without running statistics are layer norms, which VISSL counts as norms; else group norms.
    """
    keys = {entry.key for entry in entries}
    groups: list[list[Entry]] = [[], [], [], [], []]
    modules: dict[str, dict[str, Entry]] = {}
    for entry in params:
        module, _, name = entry.key.rpartition(".")
        modules.setdefault(module, {})[name] = entry
    for module, module_params in modules.items():
        first = 2 if "head" in module else 0
        weight = module_params.get("weight")
        is_layer = "weight_v" in module_params or (weight is not None and len(weight.shape) > 1)
        is_norm = f"{module}.running_mean" in keys or (is_layer_norm and weight is not None and len(weight.shape) == 1)
        if not is_layer and not is_norm:
            # Parameters of no layer (class token, position embeddings) are VISSL's last group.
            groups[4] += module_params.values()
            continue
        for name in ("weight_g", "weight_v", "weight", "bias"):
            decays = norm if is_norm else True
            if name == "bias":
                # As in VISSL's default.py: the bias of a norm decays only where both flags allow it.
                decays = bias and (norm or not is_norm)
            if name in module_params:
                groups[first + (not decays)].append(module_params[name])
    # VISSL adds the last group only where it has parameters.
    return groups if groups[4] else groups[:4]


def _take(
    sorting: list[list[Entry]], groups: list[tuple[Any, ...]], states: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the state by parameter name if the groups of the file match ``sorting``; else None."""
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
    # Leftover state shows that this is not the file's order.
    return None if rest else taken


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@dataclass(frozen=True)
class _Group:
    """The parameters in one stored tensor, one after the other: those of a flattened unit, or a single one.

    Attributes:
        key: key of the tensor in a rank's state.
        names, shapes: names and shapes of the parameters.
        padding: number of unused elements at the end of each rank's part.
        is_whole: every rank has the whole tensor.
    """

    key: str
    names: list[str]
    shapes: list[tuple[int, ...]]
    padding: list[int]
    is_whole: bool


def full_tensors(states: Sequence[Mapping[str, Tensor]], metadata: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Return full parameters, assembled from the shards when they are read, and rank 0's buffers.

    Args:
        states: ``local_state_dict`` of every rank, in order.
        metadata: ``local_metadata_dict`` of every rank.
    Raises:
        CheckpointError: the shards are incomplete or do not match.
    """
    try:
        entries = [entry for group in _groups(metadata) for entry in _entries(group, states)]
        for source, target in _shared(metadata[0]):
            source_entry = next(entry for entry in entries if entry.key == source)
            entries.append(Entry(target, source_entry.dtype, source_entry.shape, source_entry.read))
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
    """Read the layout before fairscale 0.4: one flat tensor called ``flat_param_0``, or one tensor per parameter."""
    path, names = unit["fsdp_path"], list(unit["param_names"])
    shapes = [tuple(shape) for shape in unit["param_shapes"]]
    paddings = [[int(count) for count in rank["num_padded"]] for rank in of_ranks]
    if unit["is_flat"]:
        keys, members = ["flat_param_0"], [(names, shapes)]
    else:
        keys, members = names, [([name], [shape]) for name, shape in zip(names, shapes, strict=True)]
    return [
        _Group(
            _join(path, key), [_join(path, name) for name in group_params], its, [rank[i] for rank in paddings], False
        )
        for i, (key, (group_params, its)) in enumerate(zip(keys, members, strict=True))
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
            # All ranks have the same tensor, so rank 0's is taken.
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
    """Return elements ``first`` to ``first + size`` of the concatenated parts, as ``shape``."""
    pieces, start = [], 0
    for part in parts:
        begin, end = max(first - start, 0), min(first + size - start, part.numel())
        if begin < end:
            pieces.append(part[begin:end])
        start += part.numel()
    return torch.cat(pieces).view(shape) if pieces else torch.empty(shape, dtype=parts[0].dtype)


def _shared(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [pair for unit in metadata["param_metadata"] for pair in unit.get("shared_param_info", ())]
    return [(str(source), str(target)) for source, target in pairs]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
