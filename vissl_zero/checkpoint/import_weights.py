"""Weights from elsewhere, written as a file of weights or as a checkpoint of ours."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import vissl_zero
from vissl_zero.checkpoint.export import SAFETENSORS, write_aside
from vissl_zero.checkpoint.folder import find_checkpoints
from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.checkpoint.manifest import Manifest
from vissl_zero.checkpoint.matching import COUNTERS, Match
from vissl_zero.checkpoint.shard_file import write_shard_file
from vissl_zero.checkpoint.weights import BUFFERS, PARAMETERS
from vissl_zero.checkpoint.writer import commit, write_rank
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state import Part

_BUFFER_ENDINGS = ("running_mean", "running_var", COUNTERS)


def write_imported(
    found: Match, foreign: Foreign, target: Path, config: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write what matched; gives where it is.

    Args:
        found: what to write.
        foreign: where it is from.
        target: a .safetensors file; or a run folder to be, for a checkpoint in our format, of weights alone.
        config: the resolved run as data that the model is of, for the checkpoint.
        overwrite: replace a file.
    Raises:
        CheckpointError: the target exists or cannot be written.
    """
    if target.suffix in SAFETENSORS:
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists, and nothing is overwritten. Name another, or add --overwrite.")
        metadata = {"format": "pt", "vissl_zero": vissl_zero.__version__, "imported": foreign.layout}
        write_aside(target, lambda temporary: _write_file(temporary, found, metadata))
        return target
    if target.suffix or target.is_file():
        raise CheckpointError(f"{target}: must end in .safetensors, or be the folder of a run to be, for a checkpoint.")
    if find_checkpoints(target):
        raise CheckpointError(f"{target} has checkpoints, and nothing is overwritten. Name another folder.")
    return _write_checkpoint(found, foreign, target, config or {})


def _write_file(path: Path, found: Match, metadata: Mapping[str, str]) -> None:
    write_shard_file(path, found.entries, metadata)


def _write_checkpoint(found: Match, foreign: Foreign, target: Path, config: Mapping[str, Any]) -> Path:
    parts = []
    for entry in found.entries:
        prefix = BUFFERS if entry.key.endswith(_BUFFER_ENDINGS) else PARAMETERS
        shape = torch.Size(entry.shape)
        parts.append(Part(prefix + entry.key, shape, 0, entry.num_elements, entry.dtype, entry.read))
    manifest = Manifest(
        step=foreign.iteration,
        epoch=foreign.epoch,
        epoch_samples=0,
        position=0,
        world_size=1,
        level=0,
        engine="torch",
        global_batch=int(config.get("global_batch", 0)),
        recipe=f"imported: {foreign.layout}",
        vissl_zero=vissl_zero.__version__,
        torch=str(torch.__version__),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ranks={},
        config=dict(config),
    )
    try:
        write_rank(target, manifest.step, 0, parts, {}, {})
        return commit(target, manifest)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror}).") from error
