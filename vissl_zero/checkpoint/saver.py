"""Saving while training continues: the times of saves, each rank's part, and the agreement that all is written."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich
import torch
import torch.distributed as dist
from rich.console import Console

from vissl_zero import collectives
from vissl_zero.atomic import LOCK_NAME
from vissl_zero.checkpoint.folder import (
    FOLDER_NAME,
    MANIFEST_NAME,
    LaterFormatError,
    Manifest,
    PieceFacts,
    RankManifest,
    name_of,
    partial_name_of,
    plain,
    prune,
    read_json,
    stem_of,
    write_json,
)
from vissl_zero.checkpoint.shard_file import NAMES, Entry, write_shard_file
from vissl_zero.checkpoint.snapshot import HostMemory, Snapshot, take_snapshot
from vissl_zero.engine import stopping
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.saved_state import Part
from vissl_zero.terminal import print_line


def write_rank(
    run_folder: Path,
    step: int,
    rank: int,
    parts: Sequence[Part],
    scalars: Mapping[str, Mapping[str, Any]],
    rng: Mapping[str, Any],
) -> None:
    """Write this rank's part of the checkpoint of ``step``, synced to the disk. Not collective.

    Raises:
        OSError: no room, or the disk failed.
    """
    folder = run_folder / FOLDER_NAME / partial_name_of(step)
    # The run folder is never made here: if it was moved away, a second one would get the rest of the run.
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    stem = stem_of(rank)
    # Removed first, so that a crash while writing cannot leave files of two attempts together.
    for ending in ("json", "safetensors"):
        (folder / f"{stem}.{ending}").unlink(missing_ok=True)
    entries = [Entry(part.name, part.dtype, _shape_in_file(part), part.read) for part in parts]
    written = write_shard_file(folder / f"{stem}.safetensors", entries)
    pieces = {
        part.name: PieceFacts(
            NAMES[part.dtype],
            tuple(part.full_shape),
            part.first_element,
            part.num_elements,
            written.digests[part.name],
        )
        for part in parts
    }
    manifest = RankManifest(
        written.num_bytes, written.header_digest, pieces, {k: dict(v) for k, v in scalars.items()}, dict(rng)
    )
    write_json(folder / f"{stem}.json", plain(manifest))
    _sync_folder(folder)


def commit(run_folder: Path, manifest: Manifest) -> Path:
    """Write the manifest, and give the checkpoint its name. One rank calls this, after all have written their parts.

    Args:
        run_folder: folder of the run.
        manifest: manifest without ``ranks``, which is read from the files.
    Raises:
        OSError: no room, or the disk failed.
        CheckpointError: a rank's file is missing or incomplete.
        LaterFormatError: a later version of vissl_zero has written a checkpoint of this step; it is not replaced.
    """
    base = run_folder / FOLDER_NAME
    partial, final = base / partial_name_of(manifest.step), base / name_of(manifest.step)
    # A manifest of an earlier attempt would name other files.
    (partial / MANIFEST_NAME).unlink(missing_ok=True)
    stems = [stem_of(rank) for rank in range(manifest.world_size)]
    digests = {stem: read_json(partial / f"{stem}.json")[1] for stem in stems}
    write_json(partial / MANIFEST_NAME, plain(replace(manifest, ranks=digests)))
    # Names must be on disk before the rename: after a power cut, a complete folder has all of its files.
    _sync_folder(partial)
    old = base / f".{final.name}.old"
    if os.path.lexists(final):  # of an earlier save, which was damaged or of another course of the run
        _require_replaceable(final)
        shutil.rmtree(old, ignore_errors=True)
        # Between the two renames the name is missing; it never stands for an incomplete checkpoint.
        final.rename(old)
    partial.rename(final)
    _sync_folder(base)
    shutil.rmtree(old, ignore_errors=True)
    return final


def _require_replaceable(path: Path) -> None:
    try:
        read_json(path / MANIFEST_NAME)
    except LaterFormatError:
        raise
    except CheckpointError:
        pass  # damaged


def discard(run_folder: Path, step: int) -> None:
    """Remove a checkpoint that could not be finished. One rank calls this, when all ranks have stopped writing."""
    shutil.rmtree(run_folder / FOLDER_NAME / partial_name_of(step), ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    # On Linux, syncing a file does not sync its name in the folder.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shape_in_file(part: Part) -> tuple[int, ...]:
    """Keep the shape of a part that is a full tensor, so that any safetensors reader opens a checkpoint of one rank."""
    is_whole = part.first_element == 0 and part.num_elements == part.full_shape.numel()
    return tuple(part.full_shape) if is_whole else (part.num_elements,)


logger = logging.getLogger(__name__)
_POLL_S = 0.5


@dataclass
class _Save:
    """A running save; ``is_committing``: all ranks have written, and rank 0 completes it."""

    manifest: Manifest
    work: Future[None]
    is_committing: bool = False


class Saver:
    """Writes checkpoints of a run. Every rank has a saver; methods are collective unless their docstrings differ.

    A save that fails (for example on a full disk) is abandoned on all ranks, with a warning. Earlier checkpoints stay.
    If the run folder itself is gone, every rank raises, because nothing could be saved any more.

    Args:
        run_folder: run folder on a file system that all ranks share; the same on all ranks.
        is_async: whether to copy to host memory, and write from there, while training continues; only the next update
            waits until the copy is made.
        keep_last, keep_every: see ``prune``.
        device: device of training.

    Attributes:
        latest_step: step of the newest checkpoint that is known to be complete; None: there is none.
    """

    def __init__(
        self, run_folder: Path, is_async: bool, keep_last: int, keep_every: int, device: torch.device | None = None
    ):
        self._run_folder = run_folder
        self._is_async = is_async
        self._keep = (keep_last, keep_every)
        self._memory = HostMemory(device)
        # One thread, so that a commit never overtakes the writing before it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._thread.submit(_nothing)  # starts the thread, so that the number of threads stays constant
        self._save: _Save | None = None
        self._has_lock = (run_folder / LOCK_NAME).exists()
        self.latest_step: int | None = None

    def save(self, run: Run, hooks: Sequence[Hook], is_epoch_over: bool) -> None:
        """Start to save the current state (see ``take_snapshot``), after an earlier save has ended.

        Without ``is_async``, or if state streams from a disk, the checkpoint is complete when this returns.

        Raises:
            DivergedError: the loss of the newest step is not finite; nothing is saved.
        """
        # Read the newest loss first: weights of a step that diverged must not become the newest checkpoint.
        run.settle()
        self.finish()
        # An interval in steps and one in epochs may fall on the same step.
        if self.latest_step != run.step:
            self.store(take_snapshot(run, hooks, is_epoch_over), run.sharded)

    def store(self, snapshot: Snapshot, sharded: ShardedModel) -> None:
        """Start to save ``snapshot``; no other save may be running. See ``save``."""
        # All ranks must choose the same way: a rank that saves asynchronously takes other collectives.
        streams = collectives.all_reduce_max(torch.tensor(float(snapshot.is_streamed))).item() > 0
        if self._is_async and not streams:
            self._save = _Save(snapshot.manifest, self._begin(snapshot, sharded))
            return
        done: Future[None] = Future()
        try:
            self._write(snapshot)
            done.set_result(None)
        except (OSError, CheckpointError) as error:
            done.set_exception(error)
        self._save = _Save(snapshot.manifest, done)
        self.finish()

    def advance(self) -> None:
        """Advance a running save. Cost: an all-reduce of 2 numbers; nothing if no save is running.

        Raises:
            CheckpointError: the run folder was moved or removed.
        """
        save = self._save
        if save is None:
            return
        is_done = save.work.done()
        has_failed = is_done and save.work.exception() is not None
        flags = collectives.all_reduce_max(torch.tensor([float(not is_done), float(has_failed)]))
        is_busy, has_failed = map(bool, flags.tolist())
        # Ranks act only on flags that all of them have seen, so that they take the same branch.
        if is_busy:
            return
        if has_failed:
            self._save = None
            self._give_up(save)
        elif not save.is_committing:
            # Rank 0 writes the manifest only now: a complete manifest must never name files that are not on disk.
            save.is_committing = True
            save.work = self._thread.submit(self._commit if collectives.rank() == 0 else _nothing, save.manifest)
        else:
            self.latest_step = save.manifest.step
            self._save = None

    def finish(self) -> None:
        """Wait until no save is running."""
        while self._save is not None:
            # Poll, so that early ranks don't time out in their collective.
            begun = time.monotonic()
            while not self._save.work.done() and time.monotonic() - begun < _POLL_S:
                time.sleep(0.002)
            self.advance()

    def close(self) -> None:
        """End the thread after its current write. Not collective."""
        self._thread.shutdown()

    def _begin(self, snapshot: Snapshot, sharded: ShardedModel) -> Future[None]:
        """Copy the state that a forward pass changes; the thread copies the rest, and the next update waits for it."""
        self._memory.begin()
        # Buffers and the loss's state change in the next forward pass, so they cannot wait for the thread.
        snapshot = dataclasses.replace(snapshot, replicated=self._memory.copy(snapshot.replicated))
        is_copied = threading.Event()
        work = self._thread.submit(self._copy_and_write, snapshot, is_copied)
        sharded.before_next_change(is_copied.wait)
        return work

    def _copy_and_write(self, snapshot: Snapshot, is_copied: threading.Event) -> None:
        try:
            snapshot = dataclasses.replace(snapshot, parts=self._memory.copy(snapshot.parts))
        finally:
            # Also after an error, else the next update would wait forever.
            is_copied.set()
        self._write(snapshot)

    def _is_gone(self) -> bool:
        """Check whether the run folder was moved or removed; a new one of its name does not hold the run's lock."""
        return not self._run_folder.is_dir() or (self._has_lock and not (self._run_folder / LOCK_NAME).exists())

    def _require_folder(self) -> None:
        if self._is_gone():
            raise CheckpointError(
                f"{self._run_folder} was moved or removed while the run wrote to it. Move it back and give the same "
                "command again: the run resumes from the newest checkpoint."
            )

    def _write(self, snapshot: Snapshot) -> None:
        self._require_folder()
        parts = [*snapshot.parts, *snapshot.replicated]
        write_rank(self._run_folder, snapshot.manifest.step, collectives.rank(), parts, snapshot.scalars, snapshot.rng)

    def _commit(self, manifest: Manifest) -> None:
        self._require_folder()
        commit(self._run_folder, manifest)
        try:
            # Only after the rename: there is never a moment without a complete checkpoint.
            prune(self._run_folder, *self._keep, newest=manifest.step)
        except OSError as error:
            logger.warning("Old checkpoints could not be removed (%s).", error)

    def _give_up(self, save: _Save) -> None:
        error = save.work.exception()
        local_error = None if error is None else str(error) or type(error).__name__
        # All ranks raise, or none: caches of network file systems show a moved folder at different times.
        if collectives.all_reduce_max(torch.tensor(float(self._is_gone()))):
            self._require_folder()
            raise CheckpointError(f"{self._run_folder} cannot be seen by every rank any more. Is the file system down?")
        reasons = [local_error]
        if collectives.world_size() > 1:
            reasons = [None] * collectives.world_size()
            dist.all_gather_object(reasons, local_error)
        if collectives.rank() == 0:
            discard(self._run_folder, save.manifest.step)
            rank, reason = next((r, text) for r, text in enumerate(reasons) if text is not None)
            newest = "there is none yet" if self.latest_step is None else f"the newest is of step {self.latest_step}"
            logger.warning(
                "The checkpoint of step %d could not be written (rank %d: %s). Training continues; %s.",
                save.manifest.step,
                rank,
                reason,
                newest,
            )


def _nothing(manifest: Manifest | None = None) -> None:
    """Do nothing: the first task of every thread, and the completion of a checkpoint on ranks other than 0."""


class CheckpointHook(Hook):
    """Saves at the intervals in ``CHECKPOINT``, and saves and stops if any rank is asked to (``engine/stopping.py``).

    It must be the last hook, so that the others have processed the step that is saved.

    Args:
        saver: saver of the run.
        hooks: all other hooks, whose state is saved.
        epochs, steps: intervals between checkpoints; -1: no interval. The end of the run is saved unless both are -1.
        console: console on which to announce a stop; None: rich's global console.

    Cost: nothing in a step that neither saves nor follows a save whose files are still being written.
    """

    def __init__(self, saver: Saver, hooks: Sequence[Hook], epochs: int, steps: int, console: Console | None = None):
        self._saver = saver
        self._hooks = list(hooks)
        self._epochs = epochs
        self._steps = steps
        self._console = console or rich.get_console()

    def on_step(self, run: Run, step: Step) -> None:
        self._saver.advance()
        is_last = run.step >= run.num_steps
        # At the last step the run ends anyway, with its hooks' measurements.
        if run.is_asked_to_stop and not is_last:
            self._stop(run)
        elif self._steps > 0 and run.step % self._steps == 0 and not is_last:
            self._saver.save(run, self._hooks, is_epoch_over=False)

    def on_epoch_end(self, run: Run) -> None:
        is_last = run.step >= run.num_steps
        is_wanted = self._epochs > 0 or self._steps > 0
        if is_wanted and (is_last or (self._epochs > 0 and (run.epoch + 1) % self._epochs == 0)):
            is_over = run.epoch_samples >= run.loader.order.num_kept  # not where MAX_STEPS ends the run in mid-epoch
            self._saver.save(run, self._hooks, is_over)
        if is_last:
            self._saver.finish()  # no step follows that would finish it

    def close(self, run: Run) -> None:
        self._saver.close()

    def _stop(self, run: Run) -> None:
        """Save, and end the loop after this step, with the reason of the first rank that has one."""
        request = stopping.requested_stop()
        stops = [request] * collectives.world_size()
        if len(stops) > 1:
            dist.all_gather_object(stops, request)
        # The reason of the first rank that has one, so that all ranks end with the same reason and exit code.
        run.stop = next(stop for stop in stops if stop is not None)
        self._saver.save(run, self._hooks, is_epoch_over=False)
        self._saver.finish()
        # No later step would advance the save.
        if run.is_main:
            latest = self._saver.latest_step
            saved = "no checkpoint could be saved" if latest is None else f"the checkpoint of step {latest} is saved"
            text = f"Stopping after step {run.step} ({run.stop.reason}); {saved}. The same command resumes from there."
            print_line(text, self._console)
