"""Going on from the newest checkpoint that is whole: which one that is, and what was passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from vissl_zero import collectives
from vissl_zero.checkpoint.config_difference import describe, differences, require_resumable
from vissl_zero.checkpoint.folder import find_checkpoints, remove_leftovers
from vissl_zero.checkpoint.reader import open_checkpoint
from vissl_zero.checkpoint.restore import restore
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.saved import as_data
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import CheckpointError

_MOST_LINES = 20


@dataclass
class Found:
    """What the search for a checkpoint came to; equal on every rank.

    Attributes:
        path: the newest whole one; None: the run folder has none at all.
        skipped: a sentence for each newer one that is not whole.
    """

    path: Path | None = None
    skipped: list[str] = field(default_factory=list)


def find_resumable(run_folder: Path, nth_newest: int = 1) -> Found:
    """The newest checkpoint all of whose data fit their checksums. Collective; ranks share the reading.

    Args:
        run_folder: the same on every rank.
        nth_newest: 1: the newest, 2: the one before it, ...
    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    paths = collectives.broadcast_object(find_checkpoints(run_folder) if collectives.rank() == 0 else [])
    found = Found()
    for path in paths[nth_newest - 1 :]:
        problems = _problems(path)
        if not problems:
            found.path = path
            return found
        found.skipped += problems
    if paths:
        reasons = "\n".join(found.skipped[:_MOST_LINES] or [f"There is no {nth_newest}th newest."])
        raise CheckpointError(
            f"No checkpoint in {run_folder} is whole, so there is nothing to go on from:\n{reasons}\n"
            "Restore one from a copy, or move the folder 'checkpoints' away to train from the start."
        )
    return found


def resume(run: Run, hooks: Sequence[Hook], plan: ResolvedRun) -> Found:
    """Put ``run`` where its newest whole checkpoint was made; leave it alone if there is none. Collective.

    Raises:
        CheckpointError: checkpoints are there and none is whole, or it is of another model.
        ConfigError: the configuration has changed in what must not change.
    """
    options = plan.config["CHECKPOINT"]
    if collectives.rank() == 0:
        remove_leftovers(run.folder)
    found = find_resumable(run.folder, options["LATEST_CHECKPOINT_RESUME_FILE_NUM"])
    if found.path is None:
        return found
    with open_checkpoint(found.path) as checkpoint:
        require_resumable(checkpoint.manifest.config, as_data(plan), options["ALLOW_CHANGED"])
        has_optimizer = checkpoint.manifest.config.get("optimizer", {}).get("name") == plan.optimizer.name
        restore(run, hooks, checkpoint, with_optimizer=has_optimizer)
    return found


def opening_lines(found: Found, plan: ResolvedRun) -> list[str]:
    """What to tell the user about a resume. Not a collective."""
    if found.path is None:
        return []
    lines = [f"skipped: {sentence}" for sentence in found.skipped[:_MOST_LINES]]
    with open_checkpoint(found.path) as checkpoint:
        manifest = checkpoint.manifest
    changed = describe(differences(manifest.config, as_data(plan)))
    ranks = "1 process" if manifest.world_size == 1 else f"{manifest.world_size} processes"
    lines.append(
        f"Going on from {found.path.name} (step {manifest.step}, epoch {manifest.epoch}; written at ZeRO level "
        f"{manifest.level}, {manifest.engine} engine, {ranks})."
    )
    if changed:
        lines += ["Changed since then:", *(f"  {line}" for line in changed[:_MOST_LINES])]
    if len(changed) > _MOST_LINES:
        lines.append(f"  ... and {len(changed) - _MOST_LINES} more")
    return lines


def _problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint; each rank reads its share of the files. The same list on every rank."""
    rank, world_size = collectives.rank(), collectives.world_size()
    own: list[str] = []
    try:
        with open_checkpoint(path) as checkpoint:
            own = list(checkpoint.verify(list(checkpoint.ranks)[rank::world_size]))
    except CheckpointError as error:
        own = [str(error)]
    if world_size == 1:
        return own
    gathered: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, own)
    return list(dict.fromkeys(sentence for part in gathered for sentence in part))
