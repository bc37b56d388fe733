"""Filling a freshly built run from a checkpoint, whatever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.manifest import stem_of
from vissl_zero.checkpoint.random_state import restore_random_state
from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.replicated import stored_name
from vissl_zero.checkpoint.snapshot import hook_names
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.strategy import Sharded


class StoredState:
    """A checkpoint as strategies read it (``sharding.state.SavedState``).

    Args:
        checkpoint: open.
        with_optimizer: False: as if no optimizer state had been stored.
    """

    def __init__(self, checkpoint: Checkpoint, with_optimizer: bool = True):
        self._checkpoint = checkpoint
        self._with_optimizer = with_optimizer

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``SavedState``."""
        info = self._checkpoint.tensors.get(name)
        return None if info is None else info.shape

    def names(self, prefix: str) -> list[str]:
        """See ``SavedState``."""
        if prefix.startswith("optimizer/") and not self._with_optimizer:
            return []
        return [name for name in self._checkpoint.tensors if name.startswith(prefix)]

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        """See ``SavedState``."""
        self._checkpoint.read_into(name, first_element, out)

    def scalars(self, parameter: str) -> Mapping[str, Any]:
        """See ``SavedState``."""
        return self._checkpoint.scalars(parameter) if self._with_optimizer else {}

    @property
    def loss_scale(self) -> Mapping[str, Any] | None:
        """See ``SavedState``."""
        return self._checkpoint.manifest.loss_scale


def restore(run: Run, hooks: Sequence[Hook], checkpoint: Checkpoint, with_optimizer: bool = True) -> None:
    """Put ``run`` where the checkpoint was made. Every rank calls it, before ``train``.

    On the number of ranks that wrote it, what each rank had of its own (random numbers, batch norm that is not
    synchronised) comes back too.

    Raises:
        CheckpointError: it is of another model or loss.
    """
    manifest = checkpoint.manifest
    run.sharded.restore(StoredState(checkpoint, with_optimizer))
    restore_buffers(run.sharded, checkpoint)
    _restore_criterion(run, checkpoint)
    run.step = run.first_step = manifest.step
    run.epoch, run.epoch_samples, run.position = manifest.epoch, manifest.epoch_samples, manifest.position
    run.results.update(manifest.results)
    for name, hook in zip(hook_names(hooks), hooks, strict=True):
        if name in manifest.hooks:
            hook.load_state_dict(manifest.hooks[name])
    if manifest.world_size == collectives.world_size():
        random_state = checkpoint.ranks[stem_of(collectives.rank())].rng
        if random_state:  # what was imported has none
            restore_random_state(random_state, run.device)


@torch.no_grad()
def restore_buffers(sharded: Sharded, checkpoint: Checkpoint) -> None:
    """Running statistics and the like; on the number of ranks that wrote them, each rank its own.

    Raises:
        CheckpointError: the model has others.
    """
    buffers = sharded.buffers()
    _require_same_names("buffers", buffers, checkpoint, "buffer/")
    for name, buffer in buffers.items():
        stored = stored_name(checkpoint.tensors, "buffer", name, checkpoint.manifest.world_size)
        _require_shape(stored, tuple(buffer.shape), checkpoint)
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
        checkpoint.read_into(stored, 0, flat)
        buffer.copy_(flat.view(buffer.shape))


def _restore_criterion(run: Run, checkpoint: Checkpoint) -> None:
    state: dict[str, Any] = dict(checkpoint.manifest.criterion)
    here = run.criterion.state_dict()
    tensors = {name: value for name, value in here.items() if isinstance(value, Tensor)}
    _require_same_names("tensors of the loss", tensors, checkpoint, "criterion/")
    for name, value in tensors.items():
        stored = stored_name(checkpoint.tensors, "criterion", name, checkpoint.manifest.world_size)
        _require_shape(stored, tuple(value.shape), checkpoint)
        state[name] = checkpoint.read(stored).to(value.dtype)
    run.criterion.load_state_dict(state)


def _require_same_names(kind: str, here: Mapping[str, Any], checkpoint: Checkpoint, prefix: str) -> None:
    stored = {name.removeprefix(prefix) for name in checkpoint.tensors if name.startswith(prefix)}
    if missing := sorted(here.keys() ^ stored):
        raise CheckpointError(f"{checkpoint.path} is of another model: {kind} that differ: {', '.join(missing[:5])}.")


def _require_shape(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> None:
    if (stored := checkpoint.tensors[name].shape) != shape:
        raise CheckpointError(f"{name} has shape {stored} in {checkpoint.path} and {shape} here.")
