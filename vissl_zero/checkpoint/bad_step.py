"""A bad step on disk, ``<run folder>/bad_steps/<step>``, with everything needed to run the step again.

The folder has the form of a run folder: ``config.resolved.yaml``, and a checkpoint of the state before the step, in
which each rank has stored its micro-batches next to its shards. So nothing is gathered, and the step can be run at any
level and number of ranks. ``bad_step.json`` has the reason; it is written last, so a folder with it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.folder import Checkpoint, find_checkpoints, open_checkpoint, read_json, write_json
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.checkpoint.snapshot import ForwardState, take_snapshot
from vissl_zero.data.dataset import BY_CROP, BY_SAMPLE, ImageBatch, join_batches
from vissl_zero.data.loader import rank_slice
from vissl_zero.engine.hook import Run
from vissl_zero.errors import CheckpointError
from vissl_zero.resolve.saved import RESOLVED_FILE, save_resolved
from vissl_zero.sharding.state.saved_state import Part

FOLDER_NAME = "bad_steps"
_FACTS_NAME = "bad_step.json"


@dataclass(frozen=True)
class BadStep:
    """The reason why a step is bad.

    Attributes:
        step: number of the step, from 1, as in ``metrics.jsonl``.
        why: what is wrong, as a clause.
        loss, grad_norm: loss and gradient norm as strings, which keep NaN and every digit.
        lr_factor: factor by which hooks had multiplied the learning rates.
    """

    step: int
    why: str
    loss: str
    grad_norm: str
    lr_factor: float


class NotWrittenError(Exception):
    """A bad step could not be written; it is raised on every rank, with the reason."""


def write_bad_step(
    run: Run, facts: BadStep, before: ForwardState, micro_batches: Sequence[ImageBatch]
) -> tuple[Path, int]:
    """Write a step before its update and return its folder and the bytes of all ranks. Collective.

    Args:
        run: run in progress.
        facts: why the step is bad; equal on every rank.
        before: state, before the step, that its forward passes have changed.
        micro_batches: this rank's micro-batches of the step.
    Raises:
        NotWrittenError: the disk is full or failed; no files remain.
        CheckpointError: the loss or the optimizer has state that cannot be stored.
    """
    folder = run.folder / FOLDER_NAME / str(facts.step)
    snapshot = take_snapshot(run, (), is_epoch_over=False, before=before)
    parts = [*snapshot.parts, *snapshot.replicated, *_batch_parts(run, micro_batches)]
    local_bytes = sum(part.num_elements * part.dtype.itemsize for part in parts)
    num_bytes = int(collectives.all_reduce_sum(torch.tensor(local_bytes)))
    _require_all(lambda: _prepare(run, folder, num_bytes) if run.is_main else None, folder)
    step = snapshot.manifest.step
    # One collective after each stage: rank 0 must have made the folder, and all files must be there before the
    # manifest.
    _require_all(lambda: write_rank(folder, step, run.rank, parts, snapshot.scalars, snapshot.rng), folder)

    def complete() -> None:
        if run.is_main:
            commit(folder, snapshot.manifest)
            save_resolved(run.plan, folder / RESOLVED_FILE)
            # The last file: ``read_facts`` takes a folder without it for none.
            write_json(folder / _FACTS_NAME, asdict(facts))

    _require_all(complete, folder)
    return folder, num_bytes


def _prepare(run: Run, folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(run.folder).free
    if free < num_bytes:
        raise OSError(f"it takes {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
    shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that was interrupted
    folder.mkdir(parents=True)


def _require_all(work: Callable[[], object], folder: Path) -> None:
    """Do ``work`` on every rank; if it fails on one, remove the folder and raise on all. Collective."""
    if reason := collectives.first_failure(work, OSError, CheckpointError):
        if collectives.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise NotWrittenError(reason)


def read_facts(folder: Path) -> BadStep:
    """Read the reason of a bad step.

    Raises:
        LaterFormatError: a later version has written the folder.
        CheckpointError: the folder has no bad step, or is damaged.
    """
    path = folder / _FACTS_NAME
    if not path.is_file():
        known = sorted((int(file.parent.name), file.parent) for file in folder.glob(f"{FOLDER_NAME}/[0-9]*/*.json"))
        there = f" Captured there: {', '.join(str(place) for _, place in known[:5])}." if known else ""
        must = f"is no folder of a captured step: those are <run folder>/{FOLDER_NAME}/<step>, with {_FACTS_NAME}"
        raise CheckpointError(f"{folder} {must}.{there}")
    body, _ = read_json(path)
    if set(body) != {item.name for item in fields(BadStep)}:
        raise CheckpointError(f"{path} lacks what describes a step. Capture it again with this version of vissl_zero.")
    return BadStep(**body)


def open_state(folder: Path) -> Checkpoint:
    """Open the checkpoint of the state before the step.

    Raises:
        CheckpointError: the checkpoint is incomplete.
    """
    paths = find_checkpoints(folder)
    if len(paths) != 1:
        raise CheckpointError(f"{folder} is damaged: it must hold one checkpoint, and holds {len(paths)}.")
    return open_checkpoint(paths[0])


def _batch_parts(run: Run, micro_batches: Sequence[ImageBatch]) -> list[Part]:
    """List the tensors that this rank stores of its micro-batches, with images after all changes on the device."""
    dtype = getattr(torch, run.plan.sharding.precision.master)
    tensors: dict[str, Tensor] = {}
    for index, batch in enumerate(micro_batches):
        # Changes draw random numbers for each sample. Stored as results, they need no generator when the step is run
        # again.
        changed = batch.to(run.device, dtype) if batch.changes else batch
        prefix = _prefix(run.rank, index)
        tensors |= {f"{prefix}images/{place}": image for place, image in enumerate(changed.images)}
        tensors |= {f"{prefix}{name}": rows for name, rows in changed.beside.items()}
        tensors[f"{prefix}num_crops"] = torch.tensor(changed.num_crops)
        tensors[f"{prefix}num_global"] = torch.tensor(changed.num_global)
        tensors[f"{prefix}stand_ins"] = torch.tensor(changed.stand_ins, dtype=torch.int64)
    return [Part.of(name, tensor) for name, tensor in tensors.items()]


def _prefix(rank: int, index: int) -> str:
    return f"of_rank/{rank}/batch/{index}/"


def read_batches(checkpoint: Checkpoint, rank: int, world_size: int) -> list[ImageBatch]:
    """Read a rank's micro-batches: its own if as many ranks wrote them, else an even share of all samples.

    Args:
        checkpoint: open checkpoint of the step.
        rank: rank whose micro-batches are read.
        world_size: number of ranks that run the step.
    """
    writers = checkpoint.manifest.world_size
    batches: list[ImageBatch] = []
    while f"{_prefix(0, len(batches))}num_global" in checkpoint.tensors:
        index = len(batches)
        if writers == world_size:
            batches.append(_read(checkpoint, rank, index))
        else:
            parts = [_read(checkpoint, writer, index) for writer in range(writers)]
            # In the order of ranks: a smaller or larger number of ranks then shares the samples as the loader would.
            whole = join_batches(parts, parts[0].num_global)
            local_slice = rank_slice(whole.num_local, rank, world_size)
            batches.append(whole.take(local_slice.start, local_slice.stop))
    return batches


def _read(checkpoint: Checkpoint, rank: int, index: int) -> ImageBatch:
    prefix = _prefix(rank, index)

    def read(name: str) -> Tensor:
        return checkpoint.read(prefix + name)

    num_crops = read("num_crops").tolist()
    beside: dict[str, Any] = {
        name: read(name) if prefix + name in checkpoint.tensors else None for name in (*BY_SAMPLE, *BY_CROP)
    }
    return ImageBatch(
        images=[read(f"images/{place}") for place in range(len(num_crops))],
        num_crops=num_crops,
        num_global=int(read("num_global")),
        stand_ins=tuple(read("stand_ins").tolist()),
        **beside,
    )
