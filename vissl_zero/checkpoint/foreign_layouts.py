"""Weights in the layouts of other programs: VISSL's checkpoints, plain state dicts, safetensors, vision transformers.

A checkpoint of VISSL (vissl/utils/checkpoint.py) is a dict with ``type`` and ``classy_state_dict -> base_model -> model
-> {trunk, heads}``. A ``shard_list`` names a file per rank in the same folder. A ``slice_list`` has the path of a file
for each tensor, in a folder ``<name>_layers`` next to it.

Hugging Face, torch hub's DINOv2, iBOT and MAE have their own layouts of vision transformers, which are converted to
timm's layout and back. ``models/weight_names.py`` handles layouts with different names only. These layouts also divide
tensors differently: Hugging Face stores queries, keys and values separately, and DINOv2 with registers adds a position
to the class token, which is added already in timm and here.

Sources: transformers 5.23, ``conversion_mapping.py`` and ``models/{vit,vit_mae,dinov2,dinov2_with_registers}``;
facebookresearch/dinov2 b8931f7, ``dinov2/models/vision_transformer.py`` and ``dinov2/layers/swiglu_ffn.py``;
bytedance/ibot c24f870, ``models/vision_transformer.py``; facebookresearch/mae be47fef, ``models_mae.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.foreign_state import LossState, OptimizerState, full_tensors, loss_state, optimizer_state
from vissl_zero.checkpoint.library_folder import (
    at_root,
    folder_config,
    is_library_file,
    is_library_folder,
    library_files,
)
from vissl_zero.checkpoint.library_names import renamed
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import NumpyArray, is_plain_tensor, read_torch_file
from vissl_zero.checkpoint.weights import Weights, is_torch_file, open_weights
from vissl_zero.errors import CheckpointError, did_you_mean

_MODEL = ("classy_state_dict", "base_model", "model")
# Keys under which other programs store the model's state dict, in order of choice.
# Averages of the weights come before the weights themselves, as timm and DINO load them.
_AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
_USUAL_KEYS = (*_AVERAGES, "state_dict", "model_state_dict", "model", "module", "params", "student")
_MOST_SHARDS = 100_000


@dataclass
class Foreign:
    """Weights that another program has written.

    Attributes:
        layout: description of the detected layout.
        entries: tensors under their names in the file (for transformers, in timm's layout), read one by one.
        passed_over: a sentence for each newer checkpoint of a run folder that is damaged.
        no_tensors: names of entries of the state dict that are not plain tensors.
        iteration, epoch: progress of the run that wrote the file; 0 if the file does not have it.
        optimizer: state of the optimizer, by names as in ``entries``; only of training checkpoints.
        loss: state of the loss, including the teacher.
        config: ``config.json`` of a folder that transformers or timm wrote, with ``preprocessor_config.json``'s keys
            under "preprocessor".
    """

    layout: str
    entries: list[Entry] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    no_tensors: list[str] = field(default_factory=list)
    iteration: int = 0
    epoch: int = 0
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    loss: LossState = field(default_factory=LossState)
    config: Mapping[str, Any] = field(default_factory=dict)


def read_foreign(path: Path, key: str = "") -> Foreign:
    """Open weights in any of the layouts above.

    Args:
        path: path of the file; of ours too, a run folder or a checkpoint.
        key: where a torch file holds the state dict, with dots between ("model.encoder"); empty: found by itself.
    Raises:
        CheckpointError: unreadable, damaged, refused, or without weights.
    Cost: what carries checksums is read once against them.
    """
    if not path.exists():
        raise CheckpointError(f"There is no file {path}. Correct the path.")
    if is_library_folder(path):
        return _library_folder(path, key)
    foreign = _file_or_ours(path, key)
    return replace(foreign, config=folder_config(path.parent)) if is_library_file(path) else foreign


def _file_or_ours(path: Path, key: str) -> Foreign:
    if not is_torch_file(path):
        return _ours_or_safetensors(path)
    content = read_torch_file(path)
    try:
        return _foreign(content, key, path)
    # The content is any object graph. Checking each access would double this file.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(f"{path} has a layout that no known program writes ({reason}).") from error


def _ours_or_safetensors(path: Path) -> Foreign:
    passed_over: list[str] = []
    weights = open_weights(path, passed_over, with_data=True)
    layout = "safetensors"
    if isinstance(weights.store, Checkpoint):
        layout = f"the checkpoint of step {weights.store.manifest.step}, {weights.path}"
    elif path.is_dir():
        layout = f"the weights of the end of the run, {weights.path}"
    entries = _all(weights)
    if layout != "safetensors":
        return Foreign(layout, entries, passed_over)
    rooted, which = at_root(entries)
    return Foreign(layout + which, _to_timm(rooted), passed_over)


def _all(weights: Weights) -> list[Entry]:
    return [Entry(i.name, i.dtype, i.shape, partial(weights.read, i.name)) for i in weights.tensors.values()]


def _library_folder(path: Path, key: str) -> Foreign:
    """Read a folder of ``save_pretrained`` or ``push_to_hf_hub``: one file of weights, or several with an index."""
    foreign = Foreign(f"a folder of transformers or timm, {path.name}", config=folder_config(path))
    for file in library_files(path):
        is_pickled = is_torch_file(file)
        foreign.entries += read_foreign(file, key).entries if is_pickled else _all(open_weights(file, with_data=True))
    rooted, which = at_root(foreign.entries)
    foreign.entries, foreign.layout = _to_timm(rooted), foreign.layout + which
    return _not_empty(foreign, path)


def _foreign(content: Any, key: str, path: Path) -> Foreign:
    if key:
        # A key of the user's comes before what would be recognized.
        return _state_dict(_at(content, key, path), f"a torch file, at {key}", path)
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind == "shard_list":
        return _sharded(content, path)
    if kind == "slice_list":
        return _sliced(content, path)
    # It looks like weights of its own, but would fill a part of the model only.
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
    foreign = Foreign("VISSL, consolidated", iteration=_count(content, "iteration"), epoch=_epoch(content))
    _add(foreign, model.get("trunk", {}), "trunk.")
    for prefix, head in _heads(model.get("heads", {})):
        _add(foreign, head, prefix)
    foreign.optimizer = optimizer_state(content["classy_state_dict"], foreign.entries)
    foreign.loss = loss_state([content])
    return _not_empty(foreign, path)


def _sharded(content: Mapping[str, Any], path: Path) -> Foreign:
    names = content.get("shards")
    if not isinstance(names, list) or not 0 < len(names) <= _MOST_SHARDS:
        raise CheckpointError(f"{path} lists no shards.")
    # Resolved, because the shards are next to the file, not next to a link to it.
    shards = [read_torch_file(_beside(path, str(name), path.resolve().parent)) for name in names]
    base = [_mapping(shard, _MODEL[:2], path) for shard in shards]
    models, metas = ([_mapping(entry, (part,), path) for entry in base] for part in ("model", "meta"))
    foreign = Foreign(f"VISSL, {len(names)} shards", iteration=_count(shards[0], "iteration"), epoch=_epoch(shards[0]))
    foreign.loss = loss_state(shards)
    foreign.optimizer = OptimizerState(reason="each shard numbers the state of its own pieces, and names no parameter")
    _add_entries(foreign, _whole_trunk(models, metas), "trunk.")
    metas_of_heads, heads = metas[0].get("heads") or [], models[0].get("heads", {})
    if not metas_of_heads:
        for prefix, head in _heads(heads):
            _add(foreign, head, prefix)
    for index, meta in enumerate(metas_of_heads):
        prefix = f"heads.{index}."
        if meta:
            states = [model["heads"][index] for model in models]
            _add_entries(foreign, full_tensors(states, [entry["heads"][index] for entry in metas]), prefix)
        else:
            _add(foreign, heads[index], prefix)
    return _not_empty(foreign, path)


def _whole_trunk(models: list[Mapping[str, Any]], metas: list[Mapping[str, Any]]) -> list[Entry]:
    if not metas[0].get("trunk"):
        foreign = Foreign("")
        _add(foreign, models[0].get("trunk", {}), "")
        return foreign.entries
    return full_tensors([model["trunk"] for model in models], [meta["trunk"] for meta in metas])


def _sliced(content: Mapping[str, Any], path: Path) -> Foreign:
    foreign = Foreign("VISSL, sliced", iteration=_count(content, "iteration"), epoch=_epoch(content))
    foreign.optimizer = OptimizerState(reason="slices are weights alone")
    if "classy_state_dict" in content:
        model = _mapping(content, _MODEL, path)
        places = [(prefix, part) for prefix, part in (("trunk.", model.get("trunk")), ("heads.", model.get("heads")))]
    else:
        places = [("trunk.", content.get("layers"))]
    for prefix, slices in places:
        for name, place in (slices or {}).items():
            file = _beside(path, str(place), path.resolve().parent / f"{path.resolve().stem}_layers")
            tensor = _slice(file)
            foreign.entries.append(Entry(f"{prefix}{name}", tensor.dtype, tuple(tensor.shape), partial(_slice, file)))
    return _not_empty(foreign, path)


def _slice(path: Path) -> Tensor:
    content = read_torch_file(path)
    weight = content.get("weight") if isinstance(content, Mapping) and content.get("type") == "slice" else None
    if not isinstance(weight, Tensor) or not is_plain_tensor(weight):
        raise CheckpointError(f"{path} is no slice of a VISSL checkpoint.")
    return weight.detach()


def _beside(path: Path, name: str, folder: Path) -> Path:
    """Return the path of a file that a list names, in the folder where VISSL writes it.

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
    foreign = Foreign(layout)
    _add(foreign, content, "")
    if not foreign.entries:
        keys = ", ".join(map(str, list(content)[:8]))
        raise CheckpointError(
            f"{path} has no tensors at its top; it {f'has {keys}' if keys else 'is empty'}. Name the key of the state "
            "dict: config.MODEL.WEIGHTS_INIT.STATE_DICT_KEY_NAME (checkpoint import: --key)."
        )
    rooted, which = at_root(foreign.entries)
    foreign.entries, foreign.layout = _to_timm(rooted), layout + which
    return foreign


def _add(foreign: Foreign, state: Any, prefix: str) -> None:
    if not isinstance(state, Mapping):
        foreign.no_tensors.append(prefix.rstrip("."))
        return
    for name, value in state.items():
        tensor = _tensor(value) if isinstance(name, str) else None
        if tensor is None:
            foreign.no_tensors.append(f"{prefix}{name}")
        else:
            foreign.entries.append(Entry.of(f"{prefix}{name}", tensor))


def _add_entries(foreign: Foreign, entries: list[Entry], prefix: str) -> None:
    foreign.entries += [Entry(f"{prefix}{entry.key}", entry.dtype, entry.shape, entry.read) for entry in entries]


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, NumpyArray):
        # VISSL's older weights are arrays.
        return value.tensor()
    return value.detach() if is_plain_tensor(value) else None


def _heads(heads: Any) -> list[tuple[str, Any]]:
    """Split a state dict of all heads, or a list of one for each, into pairs of prefix and state dict."""
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


def _not_empty(foreign: Foreign, path: Path) -> Foreign:
    if not foreign.entries:
        raise CheckpointError(f"{path} holds no weights.")
    return foreign


def _count(content: Mapping[str, Any], key: str, otherwise: int = 0) -> int:
    value = content.get(key)
    return value if isinstance(value, int) and 0 <= value < 2**53 else otherwise


def _epoch(content: Mapping[str, Any]) -> int:
    """Return the number of epochs done. VISSL numbers training phases from 0; -1 means before the first."""
    return _count(content, "train_phase_idx", otherwise=-1) + 1


HUGGING_FACE, DINOV2 = "hugging_face", "dinov2"
STYLES = (HUGGING_FACE, DINOV2)

_HF_MARK = "embeddings.patch_embeddings.projection.weight"
_HF_BLOCK = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)\.(\w+)")
_TIMM_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(\w+)")
# A block that FSDP's chunks of DINOv2 hold: blocks.<chunk>.<block>.; blocks are numbered throughout. Convolutional
# networks number the blocks of each stage anew, under the same names.
_CHUNKED_BLOCK = re.compile(r"(.*\bblocks\.)\d+\.(\d+\.(?:norm[12]|attn|mlp|ls[12])\..+)")
# timm -> Hugging Face, outside of blocks.
_HF_OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "mask_token": "embeddings.mask_token",
    "register_tokens": "embeddings.register_tokens",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
# Layer of timm's block -> ViTModel's and ViTMAEModel's, Dinov2Model's, and what transformers 5 calls either.
_HF_LAYERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "norm1": ("layernorm_before", "norm1", ()),
    "norm2": ("layernorm_after", "norm2", ()),
    "attn.proj": ("attention.output.dense", "attention.output.dense", ("attention.o_proj",)),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1", ("mlp.weights_in",)),
    "mlp.fc2": ("output.dense", "mlp.fc2", ("mlp.weights_out", "mlp.down_proj")),
}
# Names of a gated MLP's layers.
_GATED = {
    HUGGING_FACE: {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"},
    DINOV2: {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"},
}
_TIMM_LAYERS = {theirs: ours for ours, (vit, dino, new) in _HF_LAYERS.items() for theirs in (vit, dino, *new)}
_HF_SCALES = {"layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma"}
# What is one tensor in timm -> its parts in Hugging Face's files, and in transformers 5.
_MERGED = {
    "attn.qkv": (
        ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    ),
    "mlp.fc1": (("mlp.gate_proj", "mlp.up_proj"),),
}
_PART_OF = {part: (ours, parts) for ours, forms in _MERGED.items() for parts in forms for part in parts}


def _to_timm(entries: Sequence[Entry]) -> list[Entry]:
    """Convert the tensors to timm's layout, lazily; tensors in no known layout are not changed.

    Args:
        entries: entries of a whole state dict, since one name alone does not tell whose it is.
    """
    result = renamed(entries)
    if mark := next((entry.key for entry in result if entry.key.endswith(_HF_MARK)), None):
        result = _from_hugging_face(result, mark.removesuffix(_HF_MARK))
    names = {entry.key for entry in result}
    has_decoder = any(".decoder_" in f".{name}" for name in names)
    result = [replace(entry, key=_hub_name(entry.key, has_decoder)) for entry in result]
    result = [_reshaped(e, (1, *e.shape)) if _last(e) == "mask_token" and len(e.shape) == 2 else e for e in result]
    return _without_class_position(result)


def from_timm(entries: Sequence[Entry], style: str) -> tuple[list[Entry], list[str]]:
    """Convert a transformer from timm's layout to another library's; also return names without a counterpart there.

    Hugging Face's names are those of its files, which ``from_pretrained`` of any version reads: with layer scale
    Dinov2Model's (with registers Dinov2WithRegistersModel's), else ViTModel's, which are ViTMAEModel's too.

    Args:
        entries: under timm's names.
        style: one of ``STYLES``.
    """
    entries = _with_class_position(entries)
    shapes = {entry.key: entry.shape for entry in entries}
    # A gated MLP has twice as many outputs in its first layer as inputs in its second: values and gates.
    inner = shapes.get("blocks.0.mlp.fc2.weight", (0, 0))[1]
    is_gated = inner > 0 and shapes.get("blocks.0.mlp.fc1.weight", (0,))[0] == 2 * inner
    layers: dict[str, str] = {}
    if style == HUGGING_FACE:
        is_dinov2 = "blocks.0.ls1.gamma" in shapes
        layers |= {ours: dino if is_dinov2 else vit for ours, (vit, dino, _) in _HF_LAYERS.items()}
    layers |= _GATED[style] if is_gated else {}
    result, unknown = list[Entry](), list[str]()
    for entry in entries:
        flat = _reshaped(entry, entry.shape[1:]) if entry.key == "mask_token" else entry
        translated = _to_hugging_face(flat, layers) if style == HUGGING_FACE else [_to_dinov2(flat, layers)]
        result += translated
        unknown += [] if translated else [entry.key]
    return result, unknown


def _hub_name(name: str, has_decoder: bool) -> str:
    if match := _CHUNKED_BLOCK.fullmatch(name):
        name = match[1] + match[2]
    parent, _, last = name.rpartition(".")
    if last == "masked_embed":  # iBOT's
        return ".".join(filter(None, (parent, "mask_token")))
    if last == "mask_token" and has_decoder:  # MAE's is of the decoder's width, and of the decoder
        return ".".join(filter(None, (parent, "decoder_mask_token")))
    return re.sub(r"\.mlp\.w12\.", ".mlp.fc1.", re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", name))


def _from_hugging_face(entries: list[Entry], prefix: str) -> list[Entry]:
    outside = {theirs: ours for ours, theirs in _HF_OUTSIDE.items()}
    parts: dict[tuple[str, str, str], dict[str, Entry]] = {}
    result = []
    for entry in entries:
        plain = entry.key.removeprefix(prefix)
        match = _HF_BLOCK.fullmatch(plain) if entry.key.startswith(prefix) else None
        if match is None:
            is_trunk = entry.key.startswith(prefix) and plain in outside
            result.append(replace(entry, key=outside[plain]) if is_trunk else entry)
            continue
        block, layer, kind = match.groups()
        if layer in _PART_OF:
            parts.setdefault((block, _PART_OF[layer][0], kind), {})[layer] = entry
        elif f"{layer}.{kind}" in _HF_SCALES:
            result.append(replace(entry, key=f"blocks.{block}.{_HF_SCALES[f'{layer}.{kind}']}"))
        elif layer in _TIMM_LAYERS:
            result.append(replace(entry, key=f"blocks.{block}.{_TIMM_LAYERS[layer]}.{kind}"))
        else:
            result.append(entry)
    for (block, layer, kind), entries_of in parts.items():
        order = _PART_OF[next(iter(entries_of))][1]
        if entries_of.keys() == set(order):
            result.append(Entry.joined(f"blocks.{block}.{layer}.{kind}", [entries_of[part] for part in order]))
        else:
            result += entries_of.values()
    return result


def _to_hugging_face(entry: Entry, layers: Mapping[str, str]) -> list[Entry]:
    if name := _HF_OUTSIDE.get(entry.key):
        return [replace(entry, key=name)]
    match = _TIMM_BLOCK.fullmatch(entry.key)
    if match is None:
        return []
    block, layer, kind = match.groups()
    start = f"encoder.layer.{block}."
    for theirs, ours in _HF_SCALES.items():
        if f"{layer}.{kind}" == ours:
            return [replace(entry, key=start + theirs)]
    if layer == "attn.qkv":
        return entry.cut([f"{start}{part}.{kind}" for part in _MERGED[layer][0]])
    return [replace(entry, key=f"{start}{layers[layer]}.{kind}")] if layer in layers else []


def _to_dinov2(entry: Entry, layers: Mapping[str, str]) -> Entry:
    """Return an entry with DINOv2's name: timm's name, except in a gated MLP."""
    match = _TIMM_BLOCK.fullmatch(entry.key)
    is_other = match is not None and match[2] in layers
    return replace(entry, key=f"blocks.{match[1]}.{layers[match[2]]}.{match[3]}") if match and is_other else entry


def _without_class_position(entries: list[Entry]) -> list[Entry]:
    """Return entries for DINOv2 with registers: the class token's position is added to the token."""
    by_name = {_last(entry): entry for entry in entries}
    registers, token, positions = (by_name.get(name) for name in ("register_tokens", "cls_token", "pos_embed"))
    if registers is None or token is None or positions is None:
        return entries
    shape = (1, positions.shape[1] - 1, *positions.shape[2:])
    return [
        *(entry for entry in entries if entry not in (token, positions)),
        replace(token, read=lambda: token.read() + positions.read()[:, :1]),
        replace(positions, shape=shape, read=lambda: positions.read()[:, 1:]),
    ]


def _with_class_position(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries with a position of 0 for the class token, which includes its position already."""
    by_name = {entry.key: entry for entry in entries}
    registers, positions = by_name.get("reg_token"), by_name.get("pos_embed")
    if registers is None or positions is None:
        return list(entries)
    shape = (1, positions.shape[1] + 1, *positions.shape[2:])
    return [
        *(entry for entry in entries if entry not in (registers, positions)),
        replace(registers, key="register_tokens"),
        replace(positions, shape=shape, read=lambda: F.pad(positions.read(), (0, 0, 1, 0))),
    ]


def _reshaped(entry: Entry, shape: tuple[int, ...]) -> Entry:
    return replace(entry, shape=shape, read=lambda: entry.read().reshape(shape))


def _last(entry: Entry) -> str:
    return entry.key.rpartition(".")[2]


def as_token(entry: Entry) -> Entry:
    """Reshape VISSL's mask token from (1, D) to (1, 1, D); other entries are not changed."""
    if not entry.key.endswith("patch_masking.masked_embed") or len(entry.shape) != 2:
        return entry
    return Entry(entry.key, entry.dtype, (1, *entry.shape), lambda: entry.read()[None])
