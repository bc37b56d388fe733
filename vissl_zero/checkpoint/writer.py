"""Writing a checkpoint: each rank its own two files, then rank 0 the manifest and the final name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vissl_zero.checkpoint.folder import FOLDER_NAME, name_of, partial_name_of
from vissl_zero.checkpoint.manifest import (
    MANIFEST_NAME,
    LaterFormatError,
    Manifest,
    PieceFacts,
    RankManifest,
    plain,
    read_json,
    stem_of,
    write_json,
)
from vissl_zero.checkpoint.shard_file import NAMES, Entry, write_shard_file
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state import Part


def write_rank(
    run_folder: Path,
    step: int,
    rank: int,
    parts: Sequence[Part],
    scalars: Mapping[str, Mapping[str, Any]],
    rng: Mapping[str, Any],
) -> None:
    """Write this rank's part of the checkpoint of ``step``, synced to the disk. Not a collective.

    Raises:
        OSError: no room, or the disk failed.
    """
    folder = run_folder / FOLDER_NAME / partial_name_of(step)
    folder.mkdir(parents=True, exist_ok=True)
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
    sync_folder(folder)


def commit(run_folder: Path, manifest: Manifest) -> Path:
    """Give the checkpoint its manifest and its name. One rank calls this, when all ranks have written their part.

    Args:
        run_folder: of the run.
        manifest: all but ``ranks``, which is read from the files.
    Raises:
        OSError: no room, or the disk failed.
        CheckpointError: a rank's file is not there or not whole.
        LaterFormatError: a later version of vissl_zero has written a checkpoint of this step; it is left alone.
    """
    base = run_folder / FOLDER_NAME
    partial, final = base / partial_name_of(manifest.step), base / name_of(manifest.step)
    # A manifest of an earlier attempt would name other files.
    (partial / MANIFEST_NAME).unlink(missing_ok=True)
    stems = [stem_of(rank) for rank in range(manifest.world_size)]
    digests = {stem: read_json(partial / f"{stem}.json")[1] for stem in stems}
    write_json(partial / MANIFEST_NAME, plain(replace(manifest, ranks=digests)))
    # Names must be on disk before the rename: after a power cut, a complete folder has all of its files.
    sync_folder(partial)
    if os.path.lexists(final):  # of an earlier try, which was found damaged or comes from another course of the run
        _require_replaceable(final)
        old = base / f".{final.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        sync_folder(base)
        shutil.rmtree(old, ignore_errors=True)
        return final
    partial.rename(final)
    sync_folder(base)
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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder reach the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shape_in_file(part: Part) -> tuple[int, ...]:
    """A part that is the whole keeps its shape, so that a checkpoint of one rank opens with any safetensors reader."""
    is_whole = part.first_element == 0 and part.num_elements == part.full_shape.numel()
    return tuple(part.full_shape) if is_whole else (part.num_elements,)
