"""Training state of a custom loop in a checkpoint folder: the format that recipes write, streamed both ways."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

import vissl_zero
from vissl_zero import collectives
from vissl_zero.checkpoint.folder import open_checkpoint
from vissl_zero.checkpoint.manifest import Manifest
from vissl_zero.checkpoint.resume import StoredState, find_resumable, restore_buffers
from vissl_zero.checkpoint.saver import commit, discard, write_rank
from vissl_zero.checkpoint.snapshot import replicated_parts
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state import check_same_update, take_group_options
from vissl_zero.sharding.strategy import Sharded


def save_state(sharded: Sharded, folder: Path, step: int) -> None:
    """Write ``<folder>/checkpoints/step_<step>``: each rank what it holds, one tensor in memory at a time. Collective.

    Args:
        sharded: between two steps.
        folder: on a file system that all ranks share.
        step: optimizer steps done.
    Raises:
        CheckpointError: a rank could not write its part; what was written is removed, earlier checkpoints stay.
    """
    layout = sharded.layout()
    manifest = Manifest(
        step=step,
        epoch=0,
        epoch_samples=0,
        position=0,
        world_size=collectives.world_size(),
        level=layout["level"],
        engine=layout["engine"],
        global_batch=0,
        recipe="",
        vissl_zero=vissl_zero.__version__,
        torch=str(torch.__version__),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks={},
        groups=sharded.group_facts(),
        loss_scale=sharded.loss_scale_state(),
    )
    parts = [*sharded.parts(), *replicated_parts("buffer", sharded.buffers())]
    is_first = collectives.rank() == 0
    try:
        _on_all(lambda: write_rank(folder, step, collectives.rank(), parts, sharded.scalars(), {}))
        # Not in the same go: the manifest names the files of every rank, so all must have written theirs.
        _on_all(lambda: commit(folder, manifest) if is_first else None)
    except CheckpointError:
        if is_first:
            # All ranks have stopped writing by now: ``_on_all`` raises only after it has heard from each.
            discard(folder, step)
        raise


def load_state(sharded: Sharded, folder: Path) -> int:
    """Restore the newest complete checkpoint under ``folder``, whatever level, tier and number of ranks wrote it.

    Collective; ranks share the reading of checksums.

    Returns:
        Optimizer steps that had been done.
    Raises:
        CheckpointError: there is none that is whole, or it is of another model.
    """
    found = find_resumable(folder)
    if found.path is None:
        raise CheckpointError(f"{folder} holds no checkpoint. Name the folder that save() was given.")
    for sentence in found.skipped if collectives.rank() == 0 else ():
        logging.getLogger(__name__).warning("skipped: %s", sentence)
    with open_checkpoint(found.path) as checkpoint:
        saved = checkpoint.manifest.groups
        groups = sharded.optimizer.param_groups
        if [group["params"] for group in saved] != [group["params"] for group in sharded.group_facts()]:
            raise CheckpointError(f"{checkpoint.path} groups parameters differently. Give the same groups.")
        check_same_update(saved, groups)
        # After the checks above: what does not fit must not overwrite a part of the state.
        sharded.restore(StoredState(checkpoint))
        restore_buffers(sharded, checkpoint)
        for group, values in zip(groups, saved, strict=True):
            take_group_options(group, values)
        return checkpoint.manifest.step


def _on_all(work: Callable[[], object]) -> None:
    """Do ``work``; if it fails on any rank, raise on every rank."""
    error: Exception | None = None
    try:
        work()
    except (OSError, CheckpointError) as caught:
        error = caught
    has_failed = bool(collectives.all_reduce_max(torch.tensor(float(error is not None))))
    if error is not None:
        raise CheckpointError(f"The checkpoint could not be written: {error}.") from error
    if has_failed:
        raise CheckpointError("The checkpoint could not be written: another rank failed; see its message.")
