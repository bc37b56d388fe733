"""Export of a checkpoint's model to a file for other programs, and import of other weights to a file or checkpoint.

An export has one tensor in memory at a time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vissl_zero.atomic import replacing
from vissl_zero.checkpoint.first_weights import COUNTERS, Match, match
from vissl_zero.checkpoint.folder import IMPORTED, Checkpoint, Manifest, find_checkpoints
from vissl_zero.checkpoint.foreign_layouts import STYLES as TRANSFORMER_STYLES
from vissl_zero.checkpoint.foreign_layouts import Foreign, from_timm
from vissl_zero.checkpoint.foreign_state import OptimizerState, as_ours, method_of
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.checkpoint.shard_file import Entry, write_shard_file
from vissl_zero.checkpoint.torch_file import can_hold, write_torch_file
from vissl_zero.checkpoint.weights import BUFFERS, PARAMETERS, Weights
from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import ModelConfig
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_model
from vissl_zero.models.weight_names import STYLES, is_adapters, to_other_names
from vissl_zero.sharding.state.saved_state import OPTIMIZER, Part
from vissl_zero.version import __version__

PARTS = ("model", "trunk", "heads")
NAMES = ("own", *STYLES, *TRANSFORMER_STYLES)
SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth", ".torch", ".bin")


@dataclass(frozen=True)
class Exported:
    """The file that was written.

    Attributes:
        path: path of the file.
        names: names of its tensors.
        num_bytes: size of the file.
        left_out: our names of tensors for which the other library has no name.
    """

    path: Path
    names: list[str]
    num_bytes: int
    left_out: list[str]


def export(weights: Weights, path: Path, part: str = "model", names: str = "own", overwrite: bool = False) -> Exported:
    """Write the model, its trunk or its heads as one file: safetensors, or a torch state dict, by the file's ending.

    Data are checked against their checksums before anything is written.

    Args:
        weights: open weights.
        path: path that ends in one of ``SAFETENSORS`` or ``TORCH``.
        part: one of ``PARTS``.
        names: one of ``NAMES``; "own" keeps ours (``trunk.stem.0.weight``).
        overwrite: whether to replace an existing file.
    Raises:
        CheckpointError: data are damaged, the ending is wrong, the file exists, the part is empty, or the library has
            no such names.
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
        _require_no_adapters(ours, weights.path, names)
        renamed = to_other_names(ours, "timm" if names in TRANSFORMER_STYLES else names)
        pairs, left_out = renamed.names, renamed.unknown
        _require_trunk_names(pairs, left_out, names)
    # Before the file is opened: an export must not turn damaged data into a file whose new checksums fit.
    weights.require_undamaged(pairs.values())
    entries = [
        Entry(new, weights.tensors[old].dtype, weights.tensors[old].shape, partial(weights.read, old))
        for new, old in pairs.items()
    ]
    if names in TRANSFORMER_STYLES:
        entries, unknown = from_timm(entries, names)
        _require_transformer(pairs, unknown, names)
    _write_aside(path, lambda temporary: writer(temporary, entries, _metadata(weights)))
    return Exported(path, [entry.key for entry in entries], path.stat().st_size, left_out)


def _writer(path: Path) -> Callable[[Path, list[Entry], dict[str, str]], object]:
    if path.suffix in SAFETENSORS:
        return partial(write_shard_file, with_checksums=True)
    if path.suffix in TORCH:
        return _write_torch
    endings = ", ".join((*SAFETENSORS, *TORCH))
    raise CheckpointError(f"{path}: the ending decides the format, and must be one of {endings}.")


def _write_torch(path: Path, entries: list[Entry], metadata: dict[str, str]) -> None:
    if wrong := [entry for entry in entries if not can_hold(entry.dtype)]:
        raise CheckpointError(f"A torch file cannot hold {wrong[0].key} ({wrong[0].dtype}). Export to .safetensors.")
    write_torch_file(path, entries)


def _write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Write the user's file through a temporary file next to it; make its folder, and explain a failure."""
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


def _require_no_adapters(ours: list[str], path: Path, names: str) -> None:
    if any(map(is_adapters, ours)):
        raise CheckpointError(
            f"{path} holds LoRA adapters, for which {names} has no names. vissl-zero export --to timm merges them into "
            "the weights, --to peft writes them alone; leave out --names to keep ours."
        )


def _require_trunk_names(pairs: dict[str, str], left_out: list[str], names: str) -> None:
    lost = [name for name in left_out if name.startswith("trunk.")]
    if lost or not any(name.startswith("trunk.") for name in pairs.values()):
        found = f" ({_some(lost or left_out)})" if lost or left_out else ""
        raise CheckpointError(
            f"{names} has names for ResNet, RegNet with bottleneck blocks and vision transformers, but none for this "
            f"trunk{found}. Leave out --names to keep the names of the file."
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


_BUFFER_ENDINGS = ("running_mean", "running_var", COUNTERS)


def write_imported(
    matched: Match, foreign: Foreign, target: Path, config: Mapping[str, Any] | None, overwrite: bool
) -> tuple[Path, str]:
    """Write matched tensors and return their path, and a sentence on the optimizer's state if the file may have one.

    Args:
        matched: tensors to write.
        foreign: weights to which they belong.
        target: a .safetensors file; or a new run folder, for a checkpoint in our format with the optimizer's state.
        config: resolved run of the model as data, for the checkpoint.
        overwrite: whether to replace an existing file.
    Raises:
        CheckpointError: the target exists or cannot be written.
    """
    if target.suffix in SAFETENSORS:
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists, and nothing is overwritten. Name another, or add --overwrite.")
        metadata = {"format": "pt", "imported": foreign.layout}
        write = partial(write_shard_file, entries=matched.entries, metadata=metadata, with_checksums=True)
        _write_aside(target, write)
        reason = foreign.optimizer.reason
        if foreign.optimizer.of:
            reason = "a file of weights has no place for it; a folder (--to) has"
        return target, f"Optimizer state is not imported: {reason}." if reason else ""
    # A name with an ending is meant as a file; a folder called weights.pt would surprise.
    if target.suffix or target.is_file():
        raise CheckpointError(f"{target}: must end in .safetensors, or name a new run folder, for a checkpoint.")
    if find_checkpoints(target):
        raise CheckpointError(f"{target} has checkpoints, and nothing is overwritten. Name another folder.")
    state, about = _optimizer_state(matched, foreign.optimizer, config or {})
    of_loss, more = _loss_parts(matched, foreign, config or {})
    note = " ".join(filter(None, [about, *more]))
    return _write_checkpoint(matched, state, of_loss, foreign, target, config or {}), note


def _optimizer_state(
    matched: Match, optimizer: OptimizerState, config: Mapping[str, Any]
) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Return the optimizer's state under our names, all of it or none, and a sentence that says which."""
    name = config.get("optimizer", {}).get("name", "")
    state = {ours: optimizer.of[theirs] for ours, theirs in matched.theirs.items() if theirs in optimizer.of}
    reason = optimizer.reason
    if optimizer.of and not name:
        reason = "without a recipe (config=...) the optimizer is not known"
    elif optimizer.of and not optimizer.fits(name):
        keys = sorted({key for of_one in optimizer.of.values() for key in of_one})
        reason = f"it is {', '.join(keys)}, and the recipe's optimizer is {name}"
    # All or none: an optimizer with momentum for some parameters trains differently from one with or without it.
    elif len(state) != len(optimizer.of):
        lost = sorted(optimizer.of.keys() - set(matched.theirs.values()))
        reason = f"{len(lost)} parameters that have some are left out themselves, such as {lost[0]}"
    if reason:
        return {}, f"Optimizer state is not imported: {reason}. A run that resumes from here starts with none."
    kinds = sorted({key for of_one in state.values() for key in of_one})
    return state, f"Optimizer state is imported: {', '.join(kinds)} of {len(state)} parameters." if state else ""


def _loss_parts(matched: Match, foreign: Foreign, config: Mapping[str, Any]) -> tuple[list[Part], list[str]]:
    """Return the entries of a recipe's loss and teacher, and sentences on them; empty without a recipe."""
    tree = config.get("config", {})
    if "LOSS" not in tree:
        return [], []
    method = method_of(tree["LOSS"], foreign.loss)
    if method is None:
        return [], ["The file has no memory of images: the memory starts from scratch."]
    tensors, sentences = as_ours(method, tree["LOSS"], foreign.loss)
    parts = [Part.of(f"criterion/{name}", value.contiguous()) for name, value in tensors.items()]
    if not method.has_teacher or tree.get("DISTILLATION") is not None:
        return parts, sentences
    with torch.device("meta"):
        # Only names and shapes are needed.
        teacher = method.make_teacher(build_model(block_of(ModelConfig, tree["MODEL"])))
    shapes = {name: tuple(value.shape) for name, value in teacher.state_dict().items()}
    teachers, students = match(Foreign("", foreign.loss.teacher), shapes), match(Foreign("", matched.entries), shapes)
    if teachers.lacks("trunk") or teachers.lacks("heads"):
        teachers = students
        sentences.append("The file has no matching teacher, so the teacher starts as a copy of the model.")
    else:
        sentences.append(f"The teacher is imported: {len(teachers.entries)} tensors.")
    taken = {entry.key for entry in teachers.entries}
    # Older files lack batch norm's counters.
    for entry in [*teachers.entries, *(entry for entry in students.entries if entry.key not in taken)]:
        place = "buffer/teacher:" if entry.key.endswith(_BUFFER_ENDINGS) else "teacher/"
        parts.append(_part_of(entry, place))
    return parts, sentences


def _part_of(entry: Entry, prefix: str) -> Part:
    return Part(prefix + entry.key, torch.Size(entry.shape), 0, entry.num_elements, entry.dtype, entry.read)


def _write_checkpoint(
    matched: Match,
    state: Mapping[str, Mapping[str, Any]],
    of_loss: list[Part],
    foreign: Foreign,
    target: Path,
    config: Mapping[str, Any],
) -> Path:
    parts, numbers = [*of_loss], {}
    for entry in matched.entries:
        # A file of weights does not tell buffers from parameters, and names do.
        prefix = BUFFERS if entry.key.endswith(_BUFFER_ENDINGS) else PARAMETERS
        parts.append(_part_of(entry, prefix))
    for name, values in state.items():
        tensors = {key: value for key, value in values.items() if key != "step"}
        parts += [Part.of(f"{OPTIMIZER}{key}/{name}", tensor) for key, tensor in tensors.items()]
        numbers[name] = {"step": {"dtype": "float32", "value": values["step"]}} if "step" in values else {}
    manifest = Manifest(
        # Schedules continue at the step of the other program.
        step=foreign.iteration,
        epoch=foreign.epoch,
        epoch_samples=0,
        position=0,
        world_size=1,
        level=0,
        engine="torch",
        global_batch=int(config.get("global_batch", 0)),
        recipe=f"{IMPORTED}{foreign.layout}",
        vissl_zero=__version__,
        torch=str(torch.__version__),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ranks={},
        config=dict(config),
    )
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_rank(target, manifest.step, 0, parts, numbers, {})
        return commit(target, manifest)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror}).") from error
