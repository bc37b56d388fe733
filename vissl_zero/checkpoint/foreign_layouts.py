"""Weights as others lay them out: VISSL's consolidated, sharded and sliced checkpoints, plain state dicts, safetensors.

VISSL's (vissl/utils/checkpoint.py): a dict with ``type`` and ``classy_state_dict -> base_model -> model -> {trunk,
heads}``. A ``shard_list`` names a file per rank beside it; a ``slice_list`` has, in the place of each tensor, the path
of a file that holds it, in a folder ``<name>_layers`` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.foreign_loss import LossState, loss_state
from vissl_zero.checkpoint.foreign_optimizer import OptimizerState, optimizer_state
from vissl_zero.checkpoint.fsdp_shards import full_tensors
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import NumpyArray, is_plain_tensor, read_torch_file
from vissl_zero.checkpoint.transformer_layouts import to_timm
from vissl_zero.checkpoint.weights import is_torch_file, open_weights
from vissl_zero.errors import CheckpointError, did_you_mean

_MODEL = ("classy_state_dict", "base_model", "model")
# Where other programs keep the model's state dict, first come first served.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module", "teacher", "params")
_MOST_SHARDS = 100_000


@dataclass
class Foreign:
    """Weights from elsewhere.

    Attributes:
        layout: what the file turned out to be, in words.
        entries: tensors under their names there (a transformer's as timm cuts and calls them), read one by one.
        passed_over: a sentence for each newer checkpoint of a run folder that is damaged.
        no_tensors: names of entries of the state dict that are not plain tensors.
        iteration, epoch: of the run that wrote it; 0 where it does not say.
        optimizer: its state, by names as in ``entries``; of checkpoints of training only.
        loss: state of the loss, the teacher among it.
    """

    layout: str
    entries: list[Entry] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    no_tensors: list[str] = field(default_factory=list)
    iteration: int = 0
    epoch: int = 0
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    loss: LossState = field(default_factory=LossState)


def read_foreign(path: Path, key: str = "") -> Foreign:
    """Open weights of whatever layout.

    Args:
        path: of the file; of ours too, a run folder or a checkpoint.
        key: where a torch file holds the state dict, with dots between ("model.encoder"); empty: found by itself.
    Raises:
        CheckpointError: unreadable, damaged, refused, or without weights.
    Cost: what carries checksums is read once against them.
    """
    if not path.exists():
        raise CheckpointError(f"There is no file {path}.")
    if not is_torch_file(path):
        return _ours_or_safetensors(path)
    content = read_torch_file(path)
    try:
        return _foreign(content, key, path)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(f"{path} is laid out as no program is known to do it ({reason}).") from error


def _ours_or_safetensors(path: Path) -> Foreign:
    passed_over: list[str] = []
    weights = open_weights(path, passed_over, with_data=True)
    layout = "safetensors"
    if isinstance(weights.store, Checkpoint):
        layout = f"the checkpoint of step {weights.store.manifest.step}, {weights.path}"
    elif path.is_dir():
        layout = f"the weights of the end of the run, {weights.path}"
    entries = [Entry(i.name, i.dtype, i.shape, partial(weights.read, i.name)) for i in weights.tensors.values()]
    return Foreign(layout, to_timm(entries) if layout == "safetensors" else entries, passed_over)


def _foreign(content: Any, key: str, path: Path) -> Foreign:
    if key:
        return _state_dict(_at(content, key, path), f"a torch file, at {key}", path)
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind == "shard_list":
        return _sharded(content, path)
    if kind == "slice_list":
        return _sliced(content, path)
    if kind in ("shard", "slice"):
        raise CheckpointError(f"{path} is one {kind} of a checkpoint. Give the file that lists all of them.")
    if isinstance(content, Mapping) and "classy_state_dict" in content:
        return _consolidated(content, path)
    for usual in _USUAL_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(usual), Mapping):
            return _state_dict(content[usual], f"a torch file, at {usual}", path)
    return _state_dict(content, "a plain state dict", path)


def _consolidated(content: Mapping[str, Any], path: Path) -> Foreign:
    model = _mapping(content, _MODEL, path)
    found = Foreign("VISSL, consolidated", iteration=_count(content, "iteration"), epoch=_epoch(content))
    _add(found, model.get("trunk", {}), "trunk.")
    for prefix, head in _heads(model.get("heads", {})):
        _add(found, head, prefix)
    found.optimizer = optimizer_state(content["classy_state_dict"], found.entries)
    found.loss = loss_state([content])
    return _not_empty(found, path)


def _sharded(content: Mapping[str, Any], path: Path) -> Foreign:
    names = content.get("shards")
    if not isinstance(names, list) or not 0 < len(names) <= _MOST_SHARDS:
        raise CheckpointError(f"{path} lists no shards.")
    # Resolved: where the path given is a link, the shards lie beside the file that it names.
    shards = [read_torch_file(_beside(path, str(name), path.resolve().parent)) for name in names]
    base = [_mapping(shard, _MODEL[:2], path) for shard in shards]
    models, metas = ([_mapping(entry, (part,), path) for entry in base] for part in ("model", "meta"))
    found = Foreign(f"VISSL, {len(names)} shards", iteration=_count(shards[0], "iteration"), epoch=_epoch(shards[0]))
    found.loss = loss_state(shards)
    found.optimizer = OptimizerState(reason="each shard numbers the state of its own pieces, and names no parameter")
    _add_entries(found, _whole(models, metas, "trunk"), "trunk.")
    metas_of_heads, heads = metas[0].get("heads") or [], models[0].get("heads", {})
    if not metas_of_heads:
        for prefix, head in _heads(heads):
            _add(found, head, prefix)
    for index, meta in enumerate(metas_of_heads):
        prefix = f"heads.{index}."
        if meta:
            states = [model["heads"][index] for model in models]
            _add_entries(found, full_tensors(states, [entry["heads"][index] for entry in metas]), prefix)
        else:
            _add(found, heads[index], prefix)
    return _not_empty(found, path)


def _whole(models: list[Mapping[str, Any]], metas: list[Mapping[str, Any]], part: str) -> list[Entry]:
    if not metas[0].get(part):
        found = Foreign("")
        _add(found, models[0].get(part, {}), "")
        return found.entries
    return full_tensors([model[part] for model in models], [meta[part] for meta in metas])


def _sliced(content: Mapping[str, Any], path: Path) -> Foreign:
    found = Foreign("VISSL, sliced", iteration=_count(content, "iteration"), epoch=_epoch(content))
    found.optimizer = OptimizerState(reason="slices are weights alone")
    if "classy_state_dict" in content:
        model = _mapping(content, _MODEL, path)
        places = [(prefix, part) for prefix, part in (("trunk.", model.get("trunk")), ("heads.", model.get("heads")))]
    else:
        places = [("trunk.", content.get("layers"))]
    for prefix, slices in places:
        for name, place in (slices or {}).items():
            file = _beside(path, str(place), path.resolve().parent / f"{path.resolve().stem}_layers")
            tensor = _slice(file)
            found.entries.append(Entry(f"{prefix}{name}", tensor.dtype, tuple(tensor.shape), partial(_slice, file)))
    return _not_empty(found, path)


def _slice(path: Path) -> Tensor:
    content = read_torch_file(path)
    weight = content.get("weight") if isinstance(content, Mapping) and content.get("type") == "slice" else None
    if not isinstance(weight, Tensor) or not is_plain_tensor(weight):
        raise CheckpointError(f"{path} is no slice of a VISSL checkpoint.")
    return weight.detach()


def _beside(path: Path, name: str, folder: Path) -> Path:
    """The file that a list names, in the folder where VISSL puts it.

    Slices are listed by their absolute path on the machine that wrote them: only the last part counts, so that a copy
    can be read, and nothing else can.
    """
    plain = name.rsplit("/", 1)[-1]
    file = folder / plain
    if plain in ("", ".", "..") or "\0" in plain or ("/" in name and not name.startswith("/")):
        raise CheckpointError(f"{path} names the file {name!r}, which leads out of {folder}: refused.")
    if file.is_symlink():
        raise CheckpointError(f"{file} is a link, and links in a list are not followed: refused.")
    if not file.is_file():
        raise CheckpointError(f"{path} lists {name}, and there is no {file}. Copy it there.")
    return file


def _state_dict(content: Any, layout: str, path: Path) -> Foreign:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no state dict but a {type(content).__name__}.")
    found = Foreign(layout)
    _add(found, content, "")
    if not found.entries:
        keys = ", ".join(map(str, list(content)[:8]))
        raise CheckpointError(f"{path} has no tensors at its top; it has {keys}. Say where with --key.")
    found.entries = to_timm(found.entries)
    return found


def _add(found: Foreign, state: Any, prefix: str) -> None:
    if not isinstance(state, Mapping):
        found.no_tensors.append(prefix.rstrip("."))
        return
    for name, value in state.items():
        tensor = _tensor(value) if isinstance(name, str) else None
        if tensor is None:
            found.no_tensors.append(f"{prefix}{name}")
        else:
            found.entries.append(Entry.of(f"{prefix}{name}", tensor))


def _add_entries(found: Foreign, entries: list[Entry], prefix: str) -> None:
    found.entries += [Entry(f"{prefix}{entry.key}", entry.dtype, entry.shape, entry.read) for entry in entries]


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, NumpyArray):
        return value.tensor()
    return value.detach() if is_plain_tensor(value) else None


def _heads(heads: Any) -> list[tuple[str, Any]]:
    """A state dict of all heads, or a list of one for each."""
    return [(f"heads.{i}.", head) for i, head in enumerate(heads)] if isinstance(heads, list) else [("heads.", heads)]


def _mapping(content: Any, keys: tuple[str, ...], path: Path) -> Mapping[str, Any]:
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} is no VISSL checkpoint: {' -> '.join(keys)} is missing at {key}.")
    assert isinstance(content, Mapping)
    return content


def _at(content: Any, key: str, path: Path) -> Any:
    for part in key.split("."):
        known = list(content) if isinstance(content, Mapping) else []
        if part not in known:
            hint = did_you_mean(part, map(str, known))
            has = ", ".join(map(str, known[:8])) or "no keys"
            raise CheckpointError(f"{path} has no {part!r} (--key {key}); there it has {has}.{hint}")
        content = content[part]
    return content


def _not_empty(found: Foreign, path: Path) -> Foreign:
    if not found.entries:
        raise CheckpointError(f"{path} holds no weights.")
    return found


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key, 0)
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def _epoch(content: Mapping[str, Any]) -> int:
    """Epochs done: VISSL counts training phases from 0, and -1 before the first."""
    value = content.get("train_phase_idx", -1)
    return value + 1 if isinstance(value, int) and 0 <= value < 2**53 else 0
