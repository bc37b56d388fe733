"""The state of a run at one step: this rank's part, its random state, and on rank 0 the manifest.

It also stores replicated state, and has the check that finds ranks whose replicas differ.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.folder import Manifest
from vissl_zero.checkpoint.shard_file import bytes_of
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.errors import CheckpointError, VisslZeroError
from vissl_zero.resolve.saved import as_data
from vissl_zero.sharding.state.saved_state import Part
from vissl_zero.version import __version__


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step.

    Attributes:
        parts: parameters and optimizer state of this rank. They share memory with training, whose updates change them.
        replicated: buffers and state of the loss, which the forward pass changes too.
        scalars: see ``RankManifest``.
        rng: see ``RankManifest``.
        manifest: manifest of the whole checkpoint.
    """

    parts: list[Part]
    replicated: list[Part]
    scalars: dict[str, dict[str, Any]]
    rng: dict[str, Any]
    manifest: Manifest

    @property
    def is_streamed(self) -> bool:
        """Some of the state is on disk and passes through memory only while it is written."""
        return any(part.is_streamed for part in self.parts)


class HostMemory:
    """Host buffers that all saves reuse, because fresh memory would cost more than the copy itself.

    Args:
        device: device whose memory is copied. From a GPU, copies use their own stream, and overlap with computation.
    """

    def __init__(self, device: torch.device | None = None):
        self._device = device
        self._is_pinned = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_pinned else None
        self._buffers: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Let ``copy`` wait for all work that is queued on the device so far. The training thread calls it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Copy the parts; the copies are complete when it returns. Any thread may call it."""
        # A separate stream, so that the copies overlap with the computation.
        with torch.cuda.stream(self._stream):  # without one: nothing
            copies = [dataclasses.replace(part, read=partial(_itself, self._fill(part))) for part in parts]
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _fill(self, part: Part) -> Tensor:
        buffer = self._buffers.get(part.name)
        if buffer is None or buffer.numel() != part.num_elements or buffer.dtype != part.dtype:
            # Only pinned memory can be copied to without blocking the host.
            buffer = torch.empty(part.num_elements, dtype=part.dtype, pin_memory=self._is_pinned)
            self._buffers[part.name] = buffer
        return buffer.copy_(part.read().detach().reshape(-1), non_blocking=self._is_pinned)


def _itself(buffer: Tensor) -> Tensor:
    return buffer


@dataclass(frozen=True)
class ForwardState:
    """The state that the forward passes of a step change.

    Attributes:
        buffers: buffers of the model, by full name.
        criterion: state of the loss.
        rng: random state; see ``random_state``.
    """

    buffers: dict[str, Tensor]
    criterion: dict[str, Any]
    rng: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> ForwardState:
        """Return the current state, which shares memory with the run. Not collective."""
        return cls(run.sharded.buffers(), run.method.state_dict(), random_state(run.device))

    def copy(self) -> ForwardState:
        """Return copies of the tensors on their devices, without waiting for the device."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
        criterion = {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in self.criterion.items()
        }
        return ForwardState(buffers, criterion, self.rng)


def take_snapshot(run: Run, hooks: Sequence[Hook], is_epoch_over: bool, before: ForwardState | None = None) -> Snapshot:
    """Return the current state of the run, between two steps. Collective; copies nothing.

    Args:
        run: run in progress.
        hooks: hooks whose state is stored.
        is_epoch_over: whether ``run.epoch`` is complete, including the hooks' end of the epoch.
        before: state to store in the place of state that forward passes have changed; None: they changed nothing.
    Raises:
        CheckpointError: the loss, the optimizer or a hook has state that cannot be stored.
    """
    state = before or ForwardState.of(run)
    criterion, criterion_numbers = _split(state.criterion)
    replicated = [
        *replicated_parts("buffer", state.buffers),
        *replicated_parts("criterion", criterion),
    ]
    # The next epoch, since a resumed run must not repeat what hooks do at the end of this one.
    epoch, epoch_samples = (run.epoch + 1, 0) if is_epoch_over else (run.epoch, run.epoch_samples)
    layout = run.sharded.layout()
    manifest = Manifest(
        step=run.step,
        epoch=epoch,
        epoch_samples=epoch_samples,
        position=run.position,
        world_size=run.world_size,
        level=layout["level"],
        engine=layout["engine"],
        global_batch=run.plan.global_batch,
        recipe=run.plan.recipe,
        vissl_zero=__version__,
        torch=str(torch.__version__),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks={},
        config=as_data(run.plan),
        groups=run.sharded.group_facts(),
        loss_scale=run.sharded.loss_scale_state(),
        criterion=criterion_numbers,
        hooks=_hook_states(hooks),
        results={name: _copy(value) for name, value in run.results.items() if _is_plain(value)},
    )
    return Snapshot(list(run.sharded.parts()), replicated, run.sharded.scalars(), state.rng, manifest)


def hook_names(hooks: Sequence[Hook]) -> list[str]:
    """Return a name for each hook that is the same in a resumed run: its class, with a number if there are several."""
    names: list[str] = []
    for hook in hooks:
        name = type(hook).__name__
        names.append(name if name not in names else f"{name}.{sum(n.split('.')[0] == name for n in names)}")
    return names


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the state of the loss into its tensors, and everything else."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif _is_plain(value):
            others[name] = _copy(value)
        else:
            raise CheckpointError(
                f"State {name!r} of the loss is a {type(value).__name__}; a checkpoint holds tensors, numbers, texts, "
                "lists and dicts of them. Let get_extra_state() return one of these."
            )
    return tensors, others


def _hook_states(hooks: Sequence[Hook]) -> dict[str, Any]:
    states = {}
    for name, hook in zip(hook_names(hooks), hooks, strict=True):
        state = hook.state_dict()
        if not _is_plain(state):
            raise CheckpointError(f"state_dict() of the hook {name} holds what JSON cannot (or NaN).")
        if state:
            states[name] = _copy(state)
    return states


def _copy(value: Any) -> Any:
    """Return a copy of a value as JSON data, because a hook may change it while the checkpoint is being written."""
    return json.loads(json.dumps(value))


def _is_plain(value: Any) -> bool:
    """Check whether JSON can store the value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def random_state(device: torch.device) -> dict[str, Any]:
    """Read the state of torch's generators (and ``device``'s), numpy's and Python's. Bytes are hexadecimal."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state that ``random_state`` returned.

    Raises:
        CheckpointError: the value is not such a state.
    """
    try:
        torch.set_rng_state(_bytes(state["torch"]))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys, position, has_gauss, cached))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The checkpoint's random number generators cannot be restored ({error}).") from error


def _bytes(text: str) -> torch.Tensor:
    # A bytearray, because torch warns of tensors over memory that cannot be written.
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def replicated_parts(prefix: str, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return the parts that this rank stores of replicated tensors. Collective.

    If a tensor is equal on all ranks, rank 0 stores it under ``<prefix>/<name>``. If not, each rank stores its own
    under ``of_rank/<k>/<prefix>/<name>``. For runs with another number of ranks, rank 0 also stores the mean of
    floating point tensors, and its own of other tensors.

    Cost: one all-gather of a number; if ranks differ, an all-reduce of each floating point tensor.
    """
    rank = collectives.rank()
    # Running statistics of plain batch norm differ between ranks, which see different images.
    if _is_equal_everywhere(tensors):
        return [Part.of(f"{prefix}/{name}", tensor) for name, tensor in tensors.items()] if rank == 0 else []
    parts = [Part.of(f"of_rank/{rank}/{prefix}/{name}", tensor) for name, tensor in tensors.items()]
    for name, tensor in tensors.items():
        shared = tensor
        if tensor.is_floating_point():
            shared = collectives.all_reduce_sum(tensor) / collectives.world_size()
        if rank == 0:
            parts.append(Part.of(f"{prefix}/{name}", shared.to(tensor.dtype)))
    return parts


def stored_name(names: Mapping[str, object], prefix: str, name: str, world_size: int) -> str:
    """Return the name under which this rank finds a tensor in a checkpoint that ``world_size`` ranks have written."""
    per_rank = f"of_rank/{collectives.rank()}/{prefix}/{name}"
    return per_rank if world_size == collectives.world_size() and per_rank in names else f"{prefix}/{name}"


def _digest_of(tensors: Mapping[str, Tensor]) -> int:
    """Return a hash of 63 bits of all values."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(tensors.items()):
        # With the name: two buffers with swapped values must not look equal.
        digest.update(name.encode())
        digest.update(bytes_of(tensor.detach().to("cpu").contiguous()))
    # 63 bits, because torch's integers are signed.
    return digest.intdigest() >> 1


def _is_equal_everywhere(tensors: Mapping[str, Tensor]) -> bool:
    if collectives.world_size() == 1:
        return True
    local_digest = torch.tensor([_digest_of(tensors)])
    gathered = [torch.empty_like(local_digest) for _ in range(collectives.world_size())]
    dist.all_gather(gathered, local_digest)
    return len({int(number) for number in gathered}) == 1


class RanksDifferError(VisslZeroError):
    """Values that must be equal differ between ranks; it is raised on every rank at the same step."""


class RankCheck(Hook):
    """Compares full parameters, buffers, the loss's state and the learning rate between ranks, bit by bit.

    Args:
        every: optimizer steps between comparisons.

    Cost: one pass over them (12 GB/s on a CPU; from a GPU they are copied first), an all-gather of a number each.
    """

    def __init__(self, every: int):
        self._every = every

    def on_step(self, run: Run, step: Step) -> None:
        if run.step % self._every == 0:
            _require_equal_ranks(run)


def _require_equal_ranks(run: Run) -> None:
    """Compare now. Collective.

    Raises:
        RanksDifferError: with the names of what differs, and the ranks that differ from rank 0.
    """
    if collectives.world_size() == 1:
        return
    tensors: dict[str, Tensor] = run.sharded.replicated()
    state = run.method.state_dict()
    tensors |= {f"loss.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    rates = [float(group["lr"]) for group in run.sharded.optimizer.param_groups]
    tensors["learning rates"] = torch.tensor([*rates, float(run.step)], dtype=torch.float64)
    local_digests = torch.tensor([_digest_of({"": tensor}) for tensor in tensors.values()])
    gathered = [torch.empty_like(local_digests) for _ in range(collectives.world_size())]
    dist.all_gather(gathered, local_digests)
    differing = [
        (name, [rank for rank, numbers in enumerate(gathered) if numbers[index] != gathered[0][index]])
        for index, name in enumerate(tensors)
    ]
    if wrong := [(name, ranks) for name, ranks in differing if ranks]:
        name, ranks = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise RanksDifferError(
            f"Ranks have drifted apart by step {run.step}: {name}{others} of rank {', '.join(map(str, ranks))} is not "
            "rank 0's. A device or its memory may be at fault; resume from an earlier checkpoint on other hardware."
        )
