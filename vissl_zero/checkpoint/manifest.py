"""What the JSON files of a checkpoint say, and how they are read without trusting them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from vissl_zero.atomic import read_regular
from vissl_zero.errors import CheckpointError

FORMAT = "vissl_zero checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
IMPORTED = "imported: "  # begins the recipe of a checkpoint that was made of other people's weights
_RANK_FILE = re.compile(r"rank\d{5,7}")
_MAX_JSON_BYTES = 2**28
_MAX_DEPTH = 100


class LaterFormatError(CheckpointError):
    """A checkpoint of a later version of vissl_zero. It is never passed over for an older one, nor replaced."""


@dataclass(frozen=True)
class PieceFacts:
    """The part of a tensor that one rank has stored.

    Attributes:
        dtype: safetensors' name ("F32").
        shape: of the full tensor.
        first_element, num_elements: the part, of the full tensor flattened.
        digest: XXH3-64 of its bytes, hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    first_element: int
    num_elements: int
    digest: str


@dataclass(frozen=True)
class RankManifest:
    """``rank<k>.json``: what rank k has stored.

    Attributes:
        num_bytes, header_digest: of ``rank<k>.safetensors``.
        pieces: by tensor name.
        scalars: state that is one number per parameter (Adam's step): {parameter: {key: value}}; only what this rank
            answers for.
        rng: this rank's random number generators, by name, as hexadecimal text.
    """

    num_bytes: int
    header_digest: str
    pieces: dict[str, PieceFacts]
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``: the checkpoint as a whole.

    Attributes:
        step, epoch: optimizer steps done; the epoch that the next step belongs to (from 0).
        epoch_samples: source images of that epoch already trained on, over all ranks.
        position: source images trained on in all.
        world_size, level, engine: of the run that wrote it; it opens under any other.
        global_batch: source images per optimizer step.
        recipe: what ``config=`` named.
        vissl_zero, torch: versions that wrote it.
        created: UTC, ISO 8601.
        ranks: digests of the ranks' JSON files, by file stem ("rank00000").
        config: the resolved run as data, ``${...}`` as written; nothing in it is ever run.
        groups: parameter groups of the optimizer: name, parameters, options.
        loss_scale: state of the loss scaler, or None.
        criterion: state of the loss that is no tensor.
        hooks: state of hooks by name.
        results: figures found so far (``run.results``).
    """

    step: int
    epoch: int
    epoch_samples: int
    position: int
    world_size: int
    level: int
    engine: str
    global_batch: int
    recipe: str
    vissl_zero: str
    torch: str
    created: str
    ranks: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: dict[str, Any] | None = None
    criterion: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint as a whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.num_elements * self.dtype.itemsize


def stem_of(rank: int) -> str:
    """Name of a rank's two files, without ending."""
    return f"rank{rank:05d}"


def require_plain_name(name: str) -> str:
    """A rank's file stem, or an error: a name in a manifest must not lead out of the folder.

    Raises:
        CheckpointError: it is anything but ``rank`` and digits.
    """
    if not _RANK_FILE.fullmatch(name):
        raise CheckpointError(f"The manifest names a file {name!r}; only rank<number> files belong to a checkpoint.")
    return name


def write_json(path: Path, body: Mapping[str, Any]) -> str:
    """Write a JSON file of ours, synced to the disk; gives the digest of its body."""
    text = canonical(body)
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    whole = f'{{"format": "{FORMAT}", "format_version": {FORMAT_VERSION}, "xxh3": "{digest}",\n"body": {text}}}\n'
    with path.open("xb") as file:
        file.write(whole.encode())
        file.flush()
        os.fsync(file.fileno())
    return digest


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Body and digest of a JSON file of ours.

    Raises:
        LaterFormatError: a later version has written it.
        CheckpointError: missing, no regular file, damaged or not ours.
    """
    try:
        whole = json.loads(read_regular(path, _MAX_JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON.") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not part of a vissl_zero checkpoint.")
    version = whole.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise LaterFormatError(
            f"{path} has format version {version}; this vissl_zero reads version {FORMAT_VERSION}. "
            "Open it with the version of vissl_zero that wrote it, or a later one."
        )
    body = whole.get("body")
    if _is_deeper(body, _MAX_DEPTH):
        raise CheckpointError(f"{path} is damaged: it is nested deeper than {_MAX_DEPTH} levels.")
    try:
        digest = xxhash.xxh3_64_hexdigest(canonical(body).encode())
    except (ValueError, RecursionError):  # NaN, half of a surrogate pair
        digest = ""
    if (
        type(version) is not int
        or version != FORMAT_VERSION
        or not isinstance(body, dict)
        or digest != whole.get("xxh3")
    ):
        raise CheckpointError(f"{path} is damaged: its content does not fit its checksum.")
    return body, digest


def _is_deeper(tree: Any, most: int) -> bool:
    level = [tree]
    for _ in range(most):
        level = [item for node in level if isinstance(node, dict) for item in node.values()] + [
            item for node in level if isinstance(node, list) for item in node
        ]
        if not level:
            return False
    return True


def canonical(body: Any) -> str:
    """JSON text that is the same for equal content."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def manifest_from(body: dict[str, Any], path: Path) -> Manifest:
    """A manifest from JSON.

    Raises:
        CheckpointError: fields are missing or of the wrong kind, or a file name leads elsewhere.
    """
    known = {f.name for f in fields(Manifest)}
    try:
        manifest = Manifest(**{key: value for key, value in body.items() if key in known})
    except TypeError as error:
        raise CheckpointError(f"{path} lacks what a manifest must have.") from error
    m = manifest
    numbers = (m.step, m.epoch, m.epoch_samples, m.position, m.world_size, m.level, m.global_batch)
    texts = (m.engine, m.recipe, m.vissl_zero, m.torch, m.created)
    blocks = (m.ranks, m.config, m.criterion, m.hooks, m.results, m.loss_scale or {})
    is_sound = all(_is_count(number) for number in numbers) and all(isinstance(text, str) for text in texts)
    is_sound = is_sound and isinstance(m.groups, list) and all(isinstance(group, dict) for group in m.groups)
    if not is_sound or not all(isinstance(block, dict) for block in blocks):
        raise CheckpointError(f"{path} has fields of the wrong kind.")
    for name in manifest.ranks:
        require_plain_name(name)
    return manifest


def _is_count(value: Any) -> bool:
    # Not isinstance: True is an int to Python.
    return type(value) is int and 0 <= value < 2**63


def rank_manifest_from(body: dict[str, Any], path: Path) -> RankManifest:
    """A rank's manifest from JSON.

    Raises:
        CheckpointError: fields are missing or of the wrong kind.
    """
    try:
        pieces = {
            name: PieceFacts(**{**piece, "shape": tuple(piece["shape"])}) for name, piece in body["pieces"].items()
        }
        rank = RankManifest(**{**body, "pieces": pieces})
        numbers = [number for p in pieces.values() for number in (p.first_element, p.num_elements, *p.shape)]
        texts = [text for p in pieces.values() for text in (p.dtype, p.digest)]
        if not all(_is_count(number) for number in (*numbers, rank.num_bytes)):
            raise ValueError
        if not all(isinstance(text, str) for text in (*texts, rank.header_digest)):
            raise ValueError
        if any(math.prod(max(size, 1) for size in p.shape) >= 2**63 or len(p.shape) > 64 for p in pieces.values()):
            raise ValueError
        blocks = (rank.rng, rank.scalars, *rank.scalars.values())
        if not all(isinstance(block, dict) for block in blocks):
            raise ValueError
        return rank
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} lacks what a rank's manifest must have.") from error


def plain(record: Manifest | RankManifest) -> dict[str, Any]:
    """A manifest as JSON has it."""
    return json.loads(json.dumps(asdict(record), allow_nan=False))
