"""Read folders of weights of transformers and timm, and select one of several networks in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_regular
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.errors import CheckpointError
from vissl_zero.models.weight_names import plain_name

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_MAX_BYTES = 2**26
_MOST_NETWORKS = 4  # student, teacher and their averages
# Names of weights in the outermost module: every kind of network has one of them, once.
_ROOTS = (
    "patch_embed.proj.weight",
    "patch_embed.proj.0.0.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "embedder.embedder.convolution.weight",
    "model.stages.0.downsample_layers.0.weight",
    "stages.0.downsample_layers.0.weight",
    "conv_proj.weight",
    "conv_stem.weight",
    "stem.0.weight",
    "stem.conv.weight",
    "features.0.0.weight",
    "conv1.weight",
    "conv1.0.weight",
)
# Order of choice if a file has several networks: averages before the trained network.
_FIRST = ("ema", "teacher", "momentum", "target", "encoder_k", "encoder_q", "student", "online", "backbone")


def is_library_folder(path: Path) -> bool:
    """Check whether a folder has weights in the layout of transformers and timm."""
    return path.is_dir() and any((path / name).is_file() or _index(path, name).is_file() for name in _WHOLE)


def is_library_file(path: Path) -> bool:
    """Check whether a file has transformers' and timm's name of weights, so that ``config.json`` belongs to it."""
    return path.name in _WHOLE and path.is_file()


def library_files(path: Path) -> list[Path]:
    """Return the files of weights in a library's folder: a single file, or all shards that the index lists.

    Raises:
        CheckpointError: the index is damaged, leads out of the folder, or names a file that is missing.
    """
    for name in _WHOLE:
        if (path / name).is_file():
            return [path / name]
        index = _index(path, name)
        if not index.is_file():
            continue
        try:
            names = sorted(set(json.loads(read_regular(index, _MAX_BYTES, follow_links=True))["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not a valid index of weights ({type(error).__name__}). Copy it again."
            ) from error
        # The index may come from the network: a path in it must not reach other files of this machine.
        if wrong := [one for one in names if not isinstance(one, str) or one != Path(one).name]:
            raise CheckpointError(f"{index} names the file {wrong[0]!r}, which leads out of {path}: refused.")
        if lost := [one for one in names if not (path / one).is_file()]:
            raise CheckpointError(f"{index} lists {lost[0]}, which is not in its folder. Copy it there.")
        return [path / one for one in names]
    raise CheckpointError(f"{path} holds no weights.")


def _index(path: Path, name: str) -> Path:
    return path / f"{name}.index.json"


def folder_config(path: Path) -> dict[str, Any]:
    """Read ``config.json`` and ``preprocessor_config.json`` as data; missing or damaged files count as empty."""
    config = _read(path / "config.json")
    return {**config, "preprocessor": _read(path / "preprocessor_config.json")}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, _MAX_BYTES, follow_links=True))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(content) if isinstance(content, Mapping) else {}


def at_root(entries: Sequence[Entry]) -> tuple[list[Entry], str]:
    """Return the entries of one network of a file, without the network's prefix.

    If the file has several networks (DINO, DINOv2, MoCo, BYOL), return only the entries of the teacher. If it has one,
    return all entries.

    Returns:
        The entries, and a clause for messages about the choice; empty if there was no choice.
    """
    roots = _roots(entry.key for entry in entries)
    # Many matches mean repeated layers inside one network, such as those of a DenseNet.
    if not roots or len(roots) > _MOST_NETWORKS:
        return list(entries), ""
    root = min(roots, key=_rank)
    inside = [replace(entry, key=entry.key.removeprefix(root)) for entry in entries if entry.key.startswith(root)]
    if len(roots) > 1:
        others = ", ".join(other.rstrip(".") for other in roots if other != root)
        return inside, f", its {root.rstrip('.')} (left out: {others})"
    if plain_name(root + "x") == "x":
        return list(entries), ""
    taken = {entry.key for entry in inside}
    beside = [entry for entry in entries if not entry.key.startswith(root) and entry.key not in taken]
    return [*inside, *beside], ""


def _roots(names: Any) -> list[str]:
    """Return the outermost prefixes of names that look like a network's."""
    roots: set[str] = set()
    for name in names:
        for mark in _ROOTS:
            if name == mark or name.endswith(f".{mark}"):
                roots.add(name.removesuffix(mark))
    # Names such as conv1.weight occur in every block too. Only the outermost prefix is a network's.
    outermost = [root for root in roots if not any(root != other and root.startswith(other) for other in roots)]
    return sorted(outermost)


def _rank(root: str) -> tuple[int, str]:
    words = f"_{root.replace('.', '_')}_"
    return next((at for at, word in enumerate(_FIRST) if f"_{word}_" in words), len(_FIRST)), root
