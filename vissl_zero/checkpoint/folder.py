"""The folder of a run's checkpoints, ``<run folder>/checkpoints/step_<steps>``, and the reader of a checkpoint.

Contents of its JSON files are not trusted. Any range of a tensor can be read, whichever ranks wrote its parts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from vissl_zero.atomic import read_regular
from vissl_zero.checkpoint.shard_file import DTYPES, ShardFile, Sized, opened
from vissl_zero.errors import CheckpointError

FORMAT = "vissl_zero checkpoint"
_FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
IMPORTED = "imported: "  # prefix of the recipe in a checkpoint that was made from imported weights
_RANK_FILE = re.compile(r"rank\d{5,7}")
# Limits of what a file from elsewhere may take in memory and on the stack of recursive code.
_MAX_JSON_BYTES = 2**28
_MAX_DEPTH = 100


class LaterFormatError(CheckpointError):
    """A later version of vissl_zero wrote the checkpoint. It is neither skipped for an older one nor replaced."""


@dataclass(frozen=True)
class PieceFacts:
    """The part of a tensor that one rank has stored.

    Attributes:
        dtype: safetensors' name ("F32").
        shape: shape of the full tensor.
        first_element, num_elements: range of the part in the flattened full tensor.
        digest: XXH3-64 of the part's bytes, hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    first_element: int
    num_elements: int
    digest: str


@dataclass(frozen=True)
class RankManifest:
    """``rank<k>.json``: the manifest of the data that rank k has stored.

    Attributes:
        num_bytes, header_digest: size of ``rank<k>.safetensors``, and digest of its header.
        pieces: pieces by tensor name.
        scalars: state that is one number per parameter (Adam's step), {parameter: {key: value}}, for the parameters
            that this rank is responsible for.
        rng: states of this rank's random number generators, by name, as hexadecimal strings.
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
        step, epoch: completed optimizer steps; epoch of the next step, from 0.
        epoch_samples: source images of that epoch that all ranks have already trained on.
        position: source images that the run has trained on.
        world_size, level, engine: settings of the run that wrote it; it can be opened under any other.
        global_batch: source images per optimizer step.
        recipe: value of ``config=``.
        vissl_zero, torch: versions of the packages that wrote it.
        created: time in UTC, ISO 8601.
        ranks: digests of the ranks' JSON files, by file stem ("rank00000").
        config: resolved run as data, ``${...}`` as written; nothing in it is ever run.
        groups: parameter groups of the optimizer: name, parameters, options.
        loss_scale: state of the loss scaler, or None.
        criterion: state of the loss without its tensors.
        hooks: state of hooks by name.
        results: results so far (``run.results``).
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
class TensorInfo(Sized):
    """Dtype and shape of a full tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stem_of(rank: int) -> str:
    """Return the stem of a rank's two files."""
    return f"rank{rank:05d}"


def write_json(path: Path, body: Mapping[str, Any]) -> str:
    """Write one of our JSON files, synced to the disk. Return the digest of its body."""
    text = _canonical(body)
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    whole = f'{{"format": "{FORMAT}", "format_version": {_FORMAT_VERSION}, "xxh3": "{digest}",\n"body": {text}}}\n'
    with path.open("xb") as file:
        # "x" follows no link that someone has put there.
        file.write(whole.encode())
        file.flush()
        os.fsync(file.fileno())
    return digest


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Read body and digest of one of our JSON files.

    Raises:
        LaterFormatError: a later version has written the file.
        CheckpointError: the file is missing, not regular, damaged, or not ours.
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
    if type(version) is int and version > _FORMAT_VERSION:
        raise LaterFormatError(
            f"{path} has format version {version}; this vissl_zero reads version {_FORMAT_VERSION}. "
            "Open it with the version of vissl_zero that wrote it, or a later one."
        )
    body = whole.get("body")
    if _is_too_deep(body):
        raise CheckpointError(f"{path} is damaged: it is nested deeper than {_MAX_DEPTH} levels.")
    try:
        # Digest the parsed content, so that a reformatted file still matches.
        digest = xxhash.xxh3_64_hexdigest(_canonical(body).encode())
    except (ValueError, RecursionError):  # NaN, half of a surrogate pair
        digest = ""
    if (
        type(version) is not int
        or version != _FORMAT_VERSION
        or not isinstance(body, dict)
        or digest != whole.get("xxh3")
    ):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum.")
    return body, digest


def _is_too_deep(tree: Any) -> bool:
    # Level by level: a recursive check would itself run out of stack.
    level = [tree]
    for _ in range(_MAX_DEPTH):
        level = [item for node in level if isinstance(node, dict) for item in node.values()] + [
            item for node in level if isinstance(node, list) for item in node
        ]
        if not level:
            return False
    return True


def _canonical(body: Any) -> str:
    """Return JSON that is equal for equal content."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _manifest_from(body: dict[str, Any], path: Path) -> Manifest:
    """Build a manifest from JSON.

    Raises:
        CheckpointError: fields are missing or of the wrong type, or a file name leads out of the folder.
    """
    # Unknown fields are dropped: a later version may add some without a new format.
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
    for name in manifest.ranks:  # one must not lead out of the folder
        if not _RANK_FILE.fullmatch(name):
            raise CheckpointError(
                f"The manifest names a file {name!r}; only rank<number> files belong to a checkpoint."
            )
    return manifest


def _is_count(value: Any) -> bool:
    # Not isinstance: True is an int to Python.
    return type(value) is int and 0 <= value < 2**63


def _rank_manifest_from(body: dict[str, Any], path: Path) -> RankManifest:
    """Build a rank's manifest from JSON.

    Raises:
        CheckpointError: fields are missing or of the wrong type.
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
        # torch multiplies sizes in 64 bits, and counts 0 as 1 for strides. Larger products would wrap around.
        if any(math.prod(max(size, 1) for size in p.shape) >= 2**63 or len(p.shape) > 64 for p in pieces.values()):
            raise ValueError
        blocks = (rank.rng, rank.scalars, *rank.scalars.values())
        if not all(isinstance(block, dict) for block in blocks):
            raise ValueError
        return rank
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} lacks what a rank's manifest must have.") from error


def plain(record: Manifest | RankManifest) -> dict[str, Any]:
    """Convert a manifest to plain data for JSON."""
    # Through JSON, so that tuples are lists, as in what is read later.
    return json.loads(json.dumps(asdict(record), allow_nan=False))


@dataclass(frozen=True)
class _Piece:
    """The location of a stored range of a tensor's elements."""

    first_element: int
    num_elements: int
    stem: str


class Checkpoint:
    """An open checkpoint whose files are complete and consistent; ``verify`` checks the data.

    Files are opened when first read, and stay open until ``close``; it is a context manager. Reading takes no memory
    in addition to the tensor that is read.

    Args:
        path: folder of the checkpoint.
    Attributes:
        manifest: manifest of the whole checkpoint.
        ranks: manifests of the ranks that wrote it, by file stem ("rank00000").
        tensors: name -> TensorInfo. Names are ``model/<full name>`` (parameters), ``buffer/<full name>``,
            ``optimizer/<key>/<full name of the parameter>``, ``criterion/<name>``; tensors that differ between ranks
            are under ``of_rank/<rank>/...``.
    Raises:
        CheckpointError: a file is missing, truncated, of another checkpoint, or of a later version.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, ShardFile] = {}
        if path.is_symlink():
            # A link could be pointed elsewhere between the check of the files and their reading.
            raise CheckpointError(f"{path} is a link. Give the folder it points to.")
        body, _ = read_json(path / MANIFEST_NAME)
        self.manifest: Manifest = _manifest_from(body, path / MANIFEST_NAME)
        self.ranks: dict[str, RankManifest] = {}
        parts_of: dict[str, list[tuple[_Piece, PieceFacts]]] = {}
        for stem, digest in sorted(self.manifest.ranks.items()):
            rank_path = path / f"{stem}.json"
            rank_body, rank_digest = read_json(rank_path)
            # The manifest is written last. So a file of another attempt at this step cannot be mixed in.
            if rank_digest != digest:
                raise CheckpointError(f"{rank_path} is not the file that the manifest lists.")
            rank = self.ranks[stem] = _rank_manifest_from(rank_body, rank_path)
            # Headers only. Reading the data of a large checkpoint takes minutes, which ``verify`` shares among ranks.
            self._require_described(stem, rank)
            for name, facts in rank.pieces.items():
                piece = _Piece(facts.first_element, facts.num_elements, stem)
                parts_of.setdefault(name, []).append((piece, facts))
        self.tensors: dict[str, TensorInfo] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for name, parts in parts_of.items():
            # A piece without elements stands before the one that begins where it does: a search finds the last of them.
            parts.sort(key=lambda part: (part[0].first_element, part[0].num_elements))
            self.tensors[name] = _merge_pieces(name, parts, path)
            self._pieces[name] = [piece for piece, _ in parts]

    def read(self, name: str) -> Tensor:
        """Read a full tensor to the CPU.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        info = self._info(name)
        flat = torch.empty(info.num_elements, dtype=info.dtype)
        self.read_into(name, 0, flat)
        return flat.view(info.shape)

    def read_range(self, name: str, first_element: int, num_elements: int) -> Tensor:
        """Read a range of a flattened tensor, (num_elements,)."""
        flat = torch.empty(num_elements, dtype=self._info(name).dtype)
        self.read_into(name, first_element, flat)
        return flat

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        """Fill ``out`` (1-d) with elements of a flattened tensor, from ``first_element`` on.

        A contiguous CPU tensor of the stored dtype is filled in place; any other through a copy of the range.
        """
        info = self._info(name)
        end = first_element + out.numel()
        if not 0 <= first_element <= end <= info.num_elements:
            raise CheckpointError(f"{name} has {info.num_elements} elements; {first_element} to {end} were asked for.")
        is_direct = out.device.type == "cpu" and out.dtype == info.dtype and out.is_contiguous()
        flat = out.detach() if is_direct else torch.empty(out.numel(), dtype=info.dtype)
        pieces = self._pieces[name]
        index = max(bisect_right(pieces, first_element, key=lambda piece: piece.first_element) - 1, 0)
        for piece in pieces[index:]:
            first, stop = max(piece.first_element, first_element), min(piece.first_element + piece.num_elements, end)
            # The pieces are in order, so no later piece has an element of the range.
            if piece.first_element >= end:
                break
            if first < stop:
                target = flat[first - first_element : stop - first_element]
                self._file(piece.stem).read_into(name, first - piece.first_element, target)
        if not is_direct:
            out.detach().copy_(flat)

    def scalars(self, parameter: str) -> dict[str, Any]:
        """Read the optimizer state of a parameter whose values are single numbers (Adam's ``step``)."""
        scalars: dict[str, Any] = {}
        for rank in self.ranks.values():
            scalars |= rank.scalars.get(parameter, {})
        return scalars

    def verify(self, stems: Sequence[str] | None = None, names: Container[str] | None = None) -> Iterator[str]:
        """Compare the data with their checksums; yields a sentence for each damaged tensor.

        Args:
            stems: ranks' files to read; None: all.
            names: tensors to read; None: all.
        """
        for stem in self.manifest.ranks if stems is None else stems:
            try:
                with opened(self.path / f"{stem}.safetensors") as file:
                    for name, facts in self.ranks[stem].pieces.items():
                        if (names is None or name in names) and file.digest(name) != facts.digest:
                            yield f"{file.path} is damaged: the data of {name} do not fit their checksum."
            except CheckpointError as error:
                yield str(error)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {name}.")
        return self.tensors[name]

    def _file(self, stem: str) -> ShardFile:
        if stem not in self._files:
            self._files[stem] = ShardFile(self.path / f"{stem}.safetensors")
        return self._files[stem]

    def _require_described(self, stem: str, rank: RankManifest) -> None:
        """Require that the data file is the one that the rank's manifest describes, and has its size."""
        with opened(self.path / f"{stem}.safetensors") as file:
            if file.num_bytes != rank.num_bytes or file.header_digest != rank.header_digest:
                raise CheckpointError(f"{file.path} is not the file that {stem}.json describes.")
            shapes = {name: facts.num_elements for name, facts in rank.pieces.items()}
            if shapes != {key: torch.Size(shape).numel() for key, shape in file.shapes.items()}:
                raise CheckpointError(f"{file.path} holds other tensors than {stem}.json says.")
            if any(DTYPES.get(facts.dtype) != file.dtypes[name] for name, facts in rank.pieces.items()):
                raise CheckpointError(f"{file.path} holds tensors of other types than {stem}.json says.")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder. See ``Checkpoint``.

    Raises:
        CheckpointError: the checkpoint is incomplete, not ours, or of a later version.
    """
    return Checkpoint(Path(path))


def _merge_pieces(name: str, pieces: Sequence[tuple[_Piece, PieceFacts]], path: Path) -> TensorInfo:
    """Merge the sorted pieces of a tensor, which must cover each element once."""
    first = pieces[0][1]
    info = TensorInfo(name, DTYPES[first.dtype], first.shape)
    if any((facts.dtype, facts.shape) != (first.dtype, first.shape) for _, facts in pieces):
        raise CheckpointError(f"{path}: the ranks disagree on type or shape of {name}.")
    end = 0
    for piece, _ in pieces:
        if piece.first_element != end:
            raise CheckpointError(f"{path}: the pieces of {name} overlap or leave gaps.")
        end += piece.num_elements
    if end != info.num_elements:
        raise CheckpointError(f"{path}: the pieces of {name} do not add up to its shape.")
    return info


FOLDER_NAME = "checkpoints"
_NAME = re.compile(r"step_(\d{9,})")
_PARTIAL = re.compile(r"\.step_\d{9,}\.(partial|old)")


def name_of(step: int) -> str:
    """Return the folder of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:09d}"


def partial_name_of(step: int) -> str:
    """Return the folder of a checkpoint while it is being written."""
    return f".{name_of(step)}.partial"


def step_of(path: Path) -> int | None:
    """Return the optimizer steps in the name of a checkpoint folder; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def find_checkpoints(run_folder: str | Path) -> list[Path]:
    """List the folders of a run's finished checkpoints, newest first. Open one to learn whether it is complete."""
    return [path for _, path in numbered_checkpoints(run_folder)]


def numbered_checkpoints(run_folder: str | Path) -> list[tuple[int, Path]]:
    """List ``find_checkpoints``, each with its optimizer steps."""
    folder = Path(run_folder) / FOLDER_NAME
    if not folder.is_dir():
        return []
    checkpoints = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return sorted(checkpoints, reverse=True)


def newest_checkpoint(path: str | Path, passed_over: list[str] | None = None, with_data: bool = False) -> Checkpoint:
    """Open the checkpoint at ``path``; in a run folder, the newest one that can be opened.

    Args:
        path: path of a run folder or a checkpoint.
        passed_over: receives a sentence for each newer checkpoint that cannot be opened.
        with_data: whether to compare the data with their checksums too, and skip damaged checkpoints.
    Raises:
        LaterFormatError: the newest checkpoint that is not damaged was written by a later vissl_zero.
        CheckpointError: none can be opened; the message says why, checkpoint by checkpoint.
    """
    path = Path(path)
    candidates = find_checkpoints(path)
    if not candidates:
        if path.is_dir() and not (path / "manifest.json").exists():
            raise CheckpointError(f"{path} holds no checkpoint.")
        return _opened(path, with_data)
    reasons = []
    for candidate in candidates:
        try:
            return _opened(candidate, with_data)
        except LaterFormatError:
            # No fallback to an older checkpoint: a run that resumes from it would overwrite the newer one.
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            if passed_over is not None:
                passed_over.append(str(error))
    raise CheckpointError(f"{path} holds no checkpoint that opens:\n" + "\n".join(reasons))


def _opened(path: Path, with_data: bool) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    problems = list(checkpoint.verify()) if with_data else []
    if problems:
        # Nobody else could close it, since it is not returned.
        checkpoint.close()
        raise CheckpointError("\n".join(problems))
    return checkpoint


def remove_leftovers(run_folder: Path) -> list[str]:
    """Remove the files of interrupted saves. Return their names. One process calls this, while no save is running."""
    folder = run_folder / FOLDER_NAME
    leftovers = sorted(p for p in folder.iterdir() if _PARTIAL.fullmatch(p.name)) if folder.is_dir() else []
    for path in leftovers:
        _remove(path)
    return [path.name for path in leftovers]


def _remove(path: Path) -> None:
    """Remove a folder with its content; for a link, the link itself, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def prune(run_folder: Path, keep_last: int, keep_every: int, newest: int | None = None) -> list[Path]:
    """Remove all checkpoints but the newest ``keep_last`` and those at multiples of ``keep_every`` steps.

    Args:
        run_folder: folder of the run.
        keep_last: number of newest checkpoints to keep, at least 1; -1: all.
        keep_every: interval in optimizer steps; -1: none.
        newest: steps of the newest checkpoint to consider. Later checkpoints, damaged or of another course of the run,
            are not removed.
    Returns:
        Removed checkpoints.
    """
    if keep_last < 0:
        return []
    removed = []
    checkpoints = [each for each in numbered_checkpoints(run_folder) if newest is None or each[0] <= newest]
    for step, path in checkpoints[max(keep_last, 1) :]:
        if keep_every > 0 and step % keep_every == 0:
            continue
        # Renamed first: an incomplete checkpoint must never have the name of a complete one.
        doomed = path.with_name(f".{path.name}.old")
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)
        removed.append(path)
    return removed
