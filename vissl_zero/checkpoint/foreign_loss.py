"""State of the loss in VISSL's checkpoints: teachers, queues, memory banks, centres, clusters.

VISSL stores ``task.loss.state_dict()`` under ``loss`` beside ``classy_state_dict`` (vissl/hooks/log_hooks.py at
09270ed2), or in it. Of several processes it keeps the first one's alone: of SwAV's queue and DeepCluster's memory,
which each process has a part of, the rest is lost, as it is when VISSL resumes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vissl_zero.checkpoint.fsdp_shards import full_tensors
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import is_plain_tensor
from vissl_zero.errors import CheckpointError
from vissl_zero.methods.method import Method, build_method

_TEACHER = re.compile(r"(?:momentum_teacher|momentum_encoder|moco_encoder)\.(?:module\.)?")


@dataclass
class LossState:
    """What a checkpoint of VISSL has of its loss.

    Attributes:
        teacher: tensors of the momentum teacher under VISSL's names (``trunk...``, ``heads...``).
        tensors: all others by VISSL's names; those of iBOT's inner criterion with ``criterion.`` before them.
    """

    teacher: list[Entry] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def loss_state(contents: Sequence[Mapping[str, Any]]) -> LossState:
    """Read it.

    Args:
        contents: of the file, or of each shard in order.
    Raises:
        CheckpointError: shards of the teacher do not fit together.
    """
    states = [_of(content) for content in contents]
    first, found = states[0], LossState()
    given = {name: value for name, value in first.items() if isinstance(name, str)}
    if isinstance(given.get("teacher_meta"), Mapping):
        if not all(isinstance(state.get("teacher"), Mapping) for state in states):
            raise CheckpointError("The shards lack parts of the teacher.")
        found.teacher = full_tensors([state["teacher"] for state in states], [s["teacher_meta"] for s in states])
    elif isinstance(given.get("teacher"), Mapping):
        plain = {str(name).removeprefix("module."): value for name, value in given["teacher"].items()}
        found.teacher = [Entry.of(name, value.detach()) for name, value in plain.items() if is_plain_tensor(value)]
    inner = given.get("criterion")
    given |= {f"criterion.{name}": value for name, value in inner.items()} if isinstance(inner, Mapping) else {}
    for name, value in given.items():
        if not is_plain_tensor(value):
            continue
        if match := _TEACHER.match(name):
            found.teacher.append(Entry.of(name[match.end() :], value.detach()))
        else:
            found.tensors[name] = value.detach()
    return found


def _of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    classy = content.get("classy_state_dict")
    inner = classy.get("loss") if isinstance(classy, Mapping) else None
    for state in (content.get("loss"), inner):
        if isinstance(state, Mapping) and state:
            return state
    return {}


def method_of(loss_config: Mapping[str, Any], state: LossState) -> Method | None:
    """The method of a resolved ``LOSS`` block, for as many images as the state remembers; None: it must know them.

    A method with a memory of the images, and no state, is None.
    """
    remembered = [state.tensors.get("nce_average.memory"), state.tensors.get("assignments")]
    sizes = [tensor.shape[0 if index == 0 else -1] for index, tensor in enumerate(remembered) if tensor is not None]
    is_memory = loss_config["name"] in ("nce_loss_with_memory", "pirl_loss", "deepclusterv2_loss")
    if is_memory and not sizes:
        return None
    return build_method(loss_config, sizes[0] if sizes else 1)


def as_ours(method: Method, loss_config: Mapping[str, Any], state: LossState) -> tuple[dict[str, Tensor], list[str]]:
    """State of ``method``: what VISSL's file has, and the rest as a new run has it.

    Args:
        method: of ``method_of``.
        loss_config: the resolved ``LOSS`` block.
        state: of the file.
    Returns:
        Tensors by our names, and a sentence for each thing that was taken or could not be.
    """
    ours = {name: value.clone() for name, value in method.state_dict().items() if isinstance(value, Tensor)}
    said: list[str] = []
    done: list[str] = []
    taken = _translated(str(loss_config["name"]), loss_config, state.tensors, ours)
    for name, value in taken.items():
        if name not in ours:
            continue
        if tuple(value.shape) != tuple(ours[name].shape):
            shapes = f"{tuple(value.shape)} in the file, {tuple(ours[name].shape)} here"
            said.append(f"The loss's {name} is not imported: it has the shape {shapes}. It starts anew.")
            continue
        ours[name] = value.to(ours[name].dtype).clone()
        done.append(name)
    if done:
        said.insert(0, f"State of the loss is imported: {', '.join(sorted(done))}.")
    elif ours:
        said.insert(0, f"The file has no state of the loss: {', '.join(sorted(ours))} start anew.")
    return ours, said


def _translated(
    loss: str, config: Mapping[str, Any], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """VISSL's tensors under our names and in our form."""
    found: dict[str, Tensor] = {}
    for name, place in (("center", "centre.mean"), ("criterion.center", "centre.mean")):
        if name in theirs:
            found[place] = theirs[name].flatten()
    if "criterion.center2" in theirs:
        found["patch_centre.mean"] = theirs["criterion.center2"].flatten()
    if loss == "moco_loss" and "queue" in theirs:
        found["queue.keys"] = theirs["queue"].T  # a column a key
        if "queue_ptr" in theirs:
            found["queue.position"] = theirs["queue_ptr"].flatten()[0]
    if "nce_average.memory" in theirs:
        found["bank.memory"] = theirs["nce_average.memory"]
        if "nce_average.params" in theirs:  # negatives, temperature, Z, momentum
            normalizer = theirs["nce_average.params"].flatten()[2]
            found["bank.normalizer"], found["bank._extra_state"] = normalizer, normalizer > 0
    if "local_memory_embeddings" in theirs and "memory.embeddings" in ours:
        found |= _clusters(theirs, ours)
    if "local_emb_queue" in theirs and "queue.embeddings" in ours:
        found |= _queue(theirs, ours, (config.get(loss) or {}).get("queue") or {})
    return found


def _queue(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The first process's part of SwAV's queue; its random start is left out where the queue is not yet in use."""
    rows, queue = theirs["local_emb_queue"], ours["queue.embeddings"].clone()
    steps = theirs.get("num_iteration", torch.zeros(1)).flatten()[0]
    count = min(rows.shape[1], queue.shape[1])
    if int(steps) <= options.get("start_iter", 0) or rows.shape[0] != queue.shape[0] or rows.shape[2] != queue.shape[2]:
        return {}
    queue[:, :count] = rows[:, :count]
    return {"queue.embeddings": queue, "queue._extra_state": torch.tensor(count)}


def _clusters(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first process's part of DeepCluster's memory, and the clusters of all images."""
    is_global = re.compile(r"assignments|centroids\d+").fullmatch
    found = {f"memory.{name}": value for name, value in theirs.items() if is_global(name)}
    rows, index = theirs["local_memory_embeddings"], theirs.get("local_memory_index")
    memory, known = ours["memory.embeddings"].clone(), ours["memory.is_known"].clone()
    if index is not None and rows.shape[0] == memory.shape[0] and rows.shape[2] == memory.shape[2]:
        kept = (rows.norm(dim=2) > 0).all(dim=0) & (index < memory.shape[1])
        memory[:, index[kept]] = rows[:, kept].to(memory.dtype)
        known[index[kept]] = True
        found |= {"memory.embeddings": memory, "memory.is_known": known}
    return found
