"""Writes a model from a checkpoint to one file for other programs, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vissl_zero.atomic import replacing
from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.foreign_layouts import STYLES as TRANSFORMER_STYLES
from vissl_zero.checkpoint.foreign_layouts import from_timm
from vissl_zero.checkpoint.shard_file import Entry, write_shard_file
from vissl_zero.checkpoint.torch_file import can_hold, write_torch_file
from vissl_zero.checkpoint.weights import Weights
from vissl_zero.errors import CheckpointError
from vissl_zero.models.weight_names import STYLES, to_other_names

PARTS = ("model", "trunk", "heads")
NAMES = ("own", *STYLES, *TRANSFORMER_STYLES)
SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth", ".torch", ".bin")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: of the file.
        names: of its tensors.
        num_bytes: size of the file.
        left_out: our names of tensors that the other library has no name for.
    """

    path: Path
    names: list[str]
    num_bytes: int
    left_out: list[str]


def export(weights: Weights, path: Path, part: str = "model", names: str = "own", overwrite: bool = False) -> Exported:
    """Write the model, its trunk or its heads as one file: safetensors, or a torch state dict, by the file's ending.

    Data are checked against their checksums before anything is written.

    Args:
        weights: open.
        path: ends in one of ``SAFETENSORS`` or ``TORCH``.
        part: one of ``PARTS``.
        names: one of ``NAMES``; "own" keeps ours (``trunk.stem.0.weight``).
        overwrite: replace ``path`` if it exists.
    Raises:
        CheckpointError: damaged, a wrong ending, the file exists, nothing of that part, or no such names.
    """
    writer = _writer(path)
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists, and nothing is overwritten. Name another file, or add --overwrite.")
    ours = [name for name in weights.tensors if part == "model" or name.startswith(f"{part}.")]
    if not ours:
        raise CheckpointError(f"{weights.path} has no {part}: its tensors are {_some(list(weights.tensors))}.")
    left_out: list[str] = []
    pairs = {name: name for name in ours}
    if names != "own":
        renamed = to_other_names(ours, "timm" if names in TRANSFORMER_STYLES else names)
        pairs, left_out = renamed.names, renamed.unknown
        _require_trunk_names(pairs, left_out, names)
    weights.require_undamaged(pairs.values())
    entries = [
        Entry(new, weights.tensors[old].dtype, weights.tensors[old].shape, partial(weights.read, old))
        for new, old in pairs.items()
    ]
    if names in TRANSFORMER_STYLES:
        entries, unknown = from_timm(entries, names)
        _require_transformer(pairs, unknown, names)
    write_aside(path, lambda temporary: writer(temporary, entries, _metadata(weights)))
    return Exported(path, [entry.key for entry in entries], path.stat().st_size, left_out)


def _writer(path: Path) -> Callable[[Path, list[Entry], dict[str, str]], None]:
    if path.suffix in SAFETENSORS:
        return _write_safetensors
    if path.suffix in TORCH:
        return _write_torch
    endings = ", ".join((*SAFETENSORS, *TORCH))
    raise CheckpointError(f"{path}: the ending decides the format, and must be one of {endings}.")


def _write_safetensors(path: Path, entries: list[Entry], metadata: dict[str, str]) -> None:
    write_shard_file(path, entries, metadata, with_checksums=True)


def _write_torch(path: Path, entries: list[Entry], metadata: dict[str, str]) -> None:
    if wrong := [entry for entry in entries if not can_hold(entry.dtype)]:
        raise CheckpointError(f"A torch file cannot hold {wrong[0].key} ({wrong[0].dtype}). Export to .safetensors.")
    write_torch_file(path, entries)


def write_aside(path: Path, write: Callable[[Path], None]) -> None:
    """``replacing`` for a file that the user names: in a folder made for it, with a sentence where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}).") from error


def _metadata(weights: Weights) -> dict[str, str]:
    known = {"format": "pt"}  # other libraries look for it
    if isinstance(weights.store, Checkpoint):
        manifest = weights.store.manifest
        return known | {"recipe": manifest.recipe, "step": str(manifest.step)}
    return {**weights.store.metadata, **known}


def _require_trunk_names(pairs: dict[str, str], left_out: list[str], names: str) -> None:
    lost = [name for name in left_out if name.startswith("trunk.")]
    if lost or not any(name.startswith("trunk.") for name in pairs.values()):
        raise CheckpointError(
            f"{names} has no names for this trunk ({_some(lost)}): it has them for ResNet and for RegNet with "
            "bottleneck blocks. Leave out --names to keep ours."
        )


def _require_transformer(pairs: dict[str, str], unknown: list[str], names: str) -> None:
    lost = unknown if "patch_embed.proj.weight" in pairs else list(pairs)
    if lost:
        raise CheckpointError(
            f"{names} has no names for {_some(lost)}: it has them for plain vision transformers. "
            "Leave out --names to keep ours, or take --names timm; --part trunk leaves out the heads."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
