"""Resuming: find the newest complete checkpoint, and load it into a freshly built run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.comparison import describe, differences, require_resumable
from vissl_zero.checkpoint.folder import (
    IMPORTED,
    Checkpoint,
    LaterFormatError,
    find_checkpoints,
    open_checkpoint,
    remove_leftovers,
    stem_of,
    step_of,
)
from vissl_zero.checkpoint.snapshot import hook_names, restore_random_state, stored_name
from vissl_zero.engine.hook import TEACHER_CHECKSUM, Hook, Run
from vissl_zero.errors import CheckpointError, printable
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import as_data
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.saved_state import restore_counters

_MOST_LINES = 20


@dataclass
class Resumable:
    """The result of the search for a checkpoint; equal on every rank.

    Attributes:
        path: the newest complete checkpoint; None: the run folder has no checkpoint.
        skipped: a sentence for each newer checkpoint that is incomplete.
    """

    path: Path | None = None
    skipped: list[str] = field(default_factory=list)


def find_resumable(run_folder: Path, nth_newest: int = 1) -> Resumable:
    """Find the newest checkpoint whose data all match their checksums. Collective; ranks share the reading.

    Args:
        run_folder: run folder, or the folder of the only checkpoint to consider; the same on every rank.
        nth_newest: 1: the newest checkpoint, 2: the second newest, ...
    Raises:
        LaterFormatError: a checkpoint that comes first was written by a later vissl_zero.
        CheckpointError: there are checkpoints, but none is complete.
    """
    # One rank lists the folder: two ranks could see different checkpoints, and resume from different steps.
    paths: list[Path] = []
    if collectives.rank() == 0:
        # The user names one checkpoint: if it is missing, the error names it, and no other is used.
        paths = find_checkpoints(run_folder) if step_of(run_folder) is None else [run_folder]
    paths = collectives.broadcast_object(paths)
    resumable = Resumable()
    for path in paths[nth_newest - 1 :]:
        problems = _problems(path)
        if not problems:
            resumable.path = path
            return resumable
        resumable.skipped += problems
    if paths == [run_folder] and not run_folder.exists():
        there = [path.name for path in find_checkpoints(run_folder.parent.parent)]
        raise CheckpointError(
            f"{run_folder} does not exist. Beside it are {', '.join(there[:5])}."
            if there
            else f"{run_folder} does not exist, nor any checkpoint beside it. Correct the path."
        )
    if paths == [run_folder]:
        raise CheckpointError("\n".join(resumable.skipped[:_MOST_LINES]))
    if paths:
        reasons = "\n".join(resumable.skipped[:_MOST_LINES] or [f"There is no {nth_newest}th newest."])
        raise CheckpointError(
            f"No checkpoint in {run_folder} is complete, so there is nothing to resume from:\n{reasons}\n"
            "Restore one from a copy, or move the folder 'checkpoints' away to train from the start."
        )
    return resumable


def resume(run: Run, hooks: Sequence[Hook], plan: ResolvedRun) -> Resumable:
    """Restore ``run`` from its newest complete checkpoint; leave it unchanged if there is none. Collective.

    Raises:
        CheckpointError: there are checkpoints, but none is complete; or the checkpoint is of another model.
        ConfigError: a key that must not change has changed.
    """
    options = plan.config.CHECKPOINT
    if collectives.rank() == 0:
        # Before the search: leftovers take the room of the next save.
        remove_leftovers(run.folder)
    resumable = find_resumable(run.folder, options.LATEST_CHECKPOINT_RESUME_FILE_NUM)
    if resumable.path is None:
        return resumable
    with open_checkpoint(resumable.path) as checkpoint:
        require_resumable(checkpoint.manifest.config, as_data(plan), options.ALLOW_CHANGED)
        has_optimizer = checkpoint.manifest.config.get("optimizer", {}).get("name") == plan.optimizer.name
        restore(run, hooks, checkpoint, with_optimizer=has_optimizer)
    return resumable


def opening_lines(resumable: Resumable, plan: ResolvedRun) -> list[str]:
    """Return lines that describe a resume. Not collective."""
    if resumable.path is None:
        return []
    lines = [f"skipped: {sentence}" for sentence in resumable.skipped[:_MOST_LINES]]
    with open_checkpoint(resumable.path) as checkpoint:
        manifest = checkpoint.manifest
    found_here = differences(manifest.config, as_data(plan))
    changed = describe({key: values for key, values in found_here.items() if key != "DRY_RUN"})
    ranks = "1 process" if manifest.world_size == 1 else f"{manifest.world_size} processes"
    lines.append(
        f"Resuming from {resumable.path.name} (step {manifest.step}, epoch {manifest.epoch}; written at ZeRO level "
        f"{manifest.level}, {manifest.engine} engine, {ranks})."
    )
    if changed:
        lines += ["Changed since then:", *(f"  {line}" for line in changed[:_MOST_LINES])]
    if len(changed) > _MOST_LINES:
        lines.append(f"  ... and {len(changed) - _MOST_LINES} more")
    return [printable(line) for line in lines]


def _problems(path: Path) -> list[str]:
    """List the problems of a checkpoint, equal on every rank. Collective; each rank reads its share of the files."""
    rank, world_size = collectives.rank(), collectives.world_size()
    local_problems: list[str] = []
    later: LaterFormatError | None = None
    try:
        with open_checkpoint(path) as checkpoint:
            # By file, not by the rank that wrote it: the number of ranks may have changed.
            local_problems = list(checkpoint.verify(list(checkpoint.ranks)[rank::world_size]))
    except LaterFormatError as error:
        later = error
    except CheckpointError as error:
        local_problems = [str(error)]
    gathered: list[tuple[list[str], LaterFormatError | None]] = [(local_problems, later)]
    if world_size > 1:
        gathered = gathered * world_size
        # If one rank finds damage, all ranks must go on to the next older checkpoint.
        dist.all_gather_object(gathered, (local_problems, later))
    if refusal := next((each for _, each in gathered if each), None):
        raise LaterFormatError(
            f"{refusal}\nTo resume without it, move {path} away: continuing from an older checkpoint would replace it."
        )
    return list(dict.fromkeys(sentence for sentences, _ in gathered for sentence in sentences))


class StoredState:
    """The view of a checkpoint for strategies (``sharding.state.SavedState``).

    Args:
        checkpoint: open checkpoint.
        with_optimizer: whether to show the optimizer state; False: as if none had been stored.
    """

    def __init__(self, checkpoint: Checkpoint, with_optimizer: bool = True):
        self._checkpoint = checkpoint
        self._with_optimizer = with_optimizer

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``SavedState``."""
        info = self._checkpoint.tensors.get(name)
        return None if info is None else info.shape

    def dtype(self, name: str) -> torch.dtype | None:
        """See ``SavedState``."""
        info = self._checkpoint.tensors.get(name)
        return None if info is None else info.dtype

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
    """Restore ``run`` from a checkpoint. Every rank calls it, before ``train``.

    If as many ranks wrote it, the state of each rank (random numbers, batch norm that is not synchronized) is restored
    too.

    Raises:
        CheckpointError: the checkpoint is of another model or loss.
    """
    manifest = checkpoint.manifest
    # An imported checkpoint may lack the teacher and the loss's state; then they start as in a new run.
    lacks = {
        prefix
        for prefix in ("teacher/", "criterion/")
        if manifest.recipe.startswith(IMPORTED) and not any(name.startswith(prefix) for name in checkpoint.tensors)
    }
    # First, because the following lines change the run.
    _require_same_teacher(run, manifest.results)
    run.sharded.restore(StoredState(checkpoint, with_optimizer), with_teacher="teacher/" not in lacks)
    if with_optimizer:
        restore_counters(run.sharded.optimizer, checkpoint.manifest.groups)
    restore_buffers(run.sharded, checkpoint, with_teacher="teacher/" not in lacks)
    if "criterion/" not in lacks:
        _restore_criterion(run, checkpoint)
    run.step = run.first_step = manifest.step
    run.epoch, run.epoch_samples, run.position = manifest.epoch, manifest.epoch_samples, manifest.position
    run.results.update(manifest.results)
    for name, hook in zip(hook_names(hooks), hooks, strict=True):
        if name in manifest.hooks:
            hook.load_state_dict(manifest.hooks[name])
    # The generators of a rank have no counterpart if the number of ranks has changed.
    if manifest.world_size == collectives.world_size():
        random_state = checkpoint.ranks[stem_of(collectives.rank())].rng
        if random_state:  # imported checkpoints have none
            restore_random_state(random_state, run.device)


@torch.no_grad()
def restore_buffers(sharded: ShardedModel, checkpoint: Checkpoint, with_teacher: bool = True) -> None:
    """Restore buffers, such as running statistics; if as many ranks wrote them, each rank gets its own.

    Raises:
        CheckpointError: the model has other buffers.
    """
    buffers = {n: b for n, b in sharded.buffers().items() if with_teacher or not n.startswith("teacher:")}
    has_teacher = any(name.startswith("teacher:") for name in buffers)
    _require_same_names("buffers", buffers, checkpoint, "buffer/", "" if has_teacher else "teacher:")
    for name, buffer in buffers.items():
        stored = stored_name(checkpoint.tensors, "buffer", name, checkpoint.manifest.world_size)
        _require_shape(stored, tuple(buffer.shape), checkpoint)
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
        # Through a tensor on the host: the buffer may be on a GPU, or not contiguous.
        checkpoint.read_into(stored, 0, flat)
        buffer.copy_(flat.view(buffer.shape))


def _restore_criterion(run: Run, checkpoint: Checkpoint) -> None:
    state: dict[str, Any] = dict(checkpoint.manifest.criterion)
    here = run.method.state_dict()
    tensors = {name: value for name, value in here.items() if isinstance(value, Tensor)}
    _require_same_names("tensors of the loss", tensors, checkpoint, "criterion/")
    for name, value in tensors.items():
        stored = stored_name(checkpoint.tensors, "criterion", name, checkpoint.manifest.world_size)
        _require_same_images(stored, tuple(value.shape), checkpoint, len(run.loader.source))
        _require_shape(stored, tuple(value.shape), checkpoint)
        state[name] = checkpoint.read(stored).to(value.dtype)
    run.method.load_state_dict(state)


def _require_same_teacher(run: Run, results: Mapping[str, Any]) -> None:
    """Require that a frozen teacher, which checkpoints leave out, has the weights of the run's start."""
    before, now = (figures.get(TEACHER_CHECKSUM) for figures in (results, run.results))
    if None not in (before, now) and before != now:
        raise CheckpointError(
            "The teacher's weights are not those that this run began with. Put its file back, or begin a new run in "
            "another folder (config.CHECKPOINT.DIR)."
        )


def _require_same_names(
    kind: str, here: Mapping[str, Any], checkpoint: Checkpoint, prefix: str, passed_over: str = ""
) -> None:
    stored = {name.removeprefix(prefix) for name in checkpoint.tensors if name.startswith(prefix)}
    # Earlier versions stored a frozen teacher too.
    stored -= {name for name in stored if passed_over and name.startswith(passed_over)}
    if missing := sorted(here.keys() ^ stored):
        raise CheckpointError(f"{checkpoint.path} is of another model: {kind} that differ: {', '.join(missing[:5])}.")


def _require_same_images(name: str, shape: tuple[int, ...], checkpoint: Checkpoint, num_images: int) -> None:
    """Require that a tensor of the loss with a row for each training image has as many rows as before."""
    stored = checkpoint.tensors[name].shape
    if len(stored) != len(shape):
        return
    changed = [(old, new) for old, new in zip(stored, shape, strict=True) if old != new]
    if [new for _, new in changed] == [num_images]:
        raise CheckpointError(
            f"The loss remembers each of {changed[0][0]} training images in {checkpoint.path}, and there are "
            f"{num_images} here. Train on the same images (config.DATA.TRAIN), or start a new run in another folder "
            "(config.CHECKPOINT.DIR)."
        )


def _require_shape(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> None:
    if (stored := checkpoint.tensors[name].shape) != shape:
        raise CheckpointError(f"{name} has shape {stored} in {checkpoint.path} and {shape} here.")
