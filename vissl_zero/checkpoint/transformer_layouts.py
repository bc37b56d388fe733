"""Vision transformers as Hugging Face and torch hub's DINOv2, iBOT and MAE store them, to and from timm's layout.

Where only names differ, ``models/weight_names.py`` knows them. These layouts also cut tensors differently: Hugging Face
keeps queries, keys and values apart, and DINOv2 with registers adds a position to the class token, which timm and we
have already added.

Sources: transformers 5.23, ``conversion_mapping.py`` and ``models/{vit,vit_mae,dinov2,dinov2_with_registers}``;
facebookresearch/dinov2 b8931f7, ``dinov2/models/vision_transformer.py`` and ``dinov2/layers/swiglu_ffn.py``;
bytedance/ibot c24f870, ``models/vision_transformer.py``; facebookresearch/mae be47fef, ``models_mae.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vissl_zero.checkpoint.shard_file import Entry

HUGGING_FACE, DINOV2 = "hugging_face", "dinov2"
STYLES = (HUGGING_FACE, DINOV2)

_HF_MARK = "embeddings.patch_embeddings.projection.weight"
_HF_BLOCK = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)\.(\w+)")
_TIMM_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(\w+)")
# A block that FSDP's chunks of DINOv2 hold: blocks.<chunk>.<block>.; blocks are numbered throughout.
_CHUNKED_BLOCK = re.compile(r"(.*\bblocks\.)\d+\.(\d+\..+)")
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
# What a gated MLP's layers are called.
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


def to_timm(entries: Sequence[Entry]) -> list[Entry]:
    """The same tensors in timm's layout, lazily; what is in no layout known here stays as it is.

    Args:
        entries: of a whole state dict, since one name alone does not tell whose it is.
    """
    result = list(entries)
    if mark := next((entry.key for entry in result if entry.key.endswith(_HF_MARK)), None):
        result = _from_hugging_face(result, mark.removesuffix(_HF_MARK))
    names = {entry.key for entry in result}
    has_decoder = any(".decoder_" in f".{name}" for name in names)
    result = [replace(entry, key=_hub_name(entry.key, has_decoder)) for entry in result]
    result = [_reshaped(e, (1, *e.shape)) if _last(e) == "mask_token" and len(e.shape) == 2 else e for e in result]
    return _without_class_position(result)


def from_timm(entries: Sequence[Entry], style: str) -> tuple[list[Entry], list[str]]:
    """A transformer in timm's layout as another library stores it, and the names that it has no place for.

    Hugging Face's names are those of its files, which ``from_pretrained`` of any version reads: with layer scale
    Dinov2Model's (with registers Dinov2WithRegistersModel's), else ViTModel's, which are ViTMAEModel's too.

    Args:
        entries: under timm's names.
        style: one of ``STYLES``.
    """
    entries = _with_class_position(entries)
    shapes = {entry.key: entry.shape for entry in entries}
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
        found = _to_hugging_face(flat, layers) if style == HUGGING_FACE else [_to_dinov2(flat, layers)]
        result += found
        unknown += [] if found else [entry.key]
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
    for (block, layer, kind), found in parts.items():
        order = _PART_OF[next(iter(found))][1]
        if found.keys() == set(order):
            result.append(_joined(f"blocks.{block}.{layer}.{kind}", [found[part] for part in order]))
        else:
            result += found.values()
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
        return _cut(entry, [f"{start}{part}.{kind}" for part in _MERGED[layer][0]])
    return [replace(entry, key=f"{start}{layers[layer]}.{kind}")] if layer in layers else []


def _to_dinov2(entry: Entry, layers: Mapping[str, str]) -> Entry:
    """DINOv2's own names are timm's, but for a gated MLP."""
    match = _TIMM_BLOCK.fullmatch(entry.key)
    is_other = match is not None and match[2] in layers
    return replace(entry, key=f"blocks.{match[1]}.{layers[match[2]]}.{match[3]}") if match and is_other else entry


def _without_class_position(entries: list[Entry]) -> list[Entry]:
    """DINOv2 with registers: the class token with its position in it, positions of patches alone."""
    found = {_last(entry): entry for entry in entries}
    registers, token, positions = (found.get(name) for name in ("register_tokens", "cls_token", "pos_embed"))
    if registers is None or token is None or positions is None:
        return entries
    shape = (1, positions.shape[1] - 1, *positions.shape[2:])
    return [
        *(entry for entry in entries if entry not in (token, positions)),
        replace(token, read=_reading(lambda t, p: t + p[:, :1], token, positions)),
        replace(positions, shape=shape, read=_reading(lambda p: p[:, 1:], positions)),
    ]


def _with_class_position(entries: Sequence[Entry]) -> list[Entry]:
    """The way back: the class token's position is 0, since it is in the token."""
    found = {entry.key: entry for entry in entries}
    registers, positions = found.get("reg_token"), found.get("pos_embed")
    if registers is None or positions is None:
        return list(entries)
    shape = (1, positions.shape[1] + 1, *positions.shape[2:])
    return [
        *(entry for entry in entries if entry not in (registers, positions)),
        replace(registers, key="register_tokens"),
        replace(
            positions, shape=shape, read=_reading(lambda p: torch.cat([torch.zeros_like(p[:, :1]), p], 1), positions)
        ),
    ]


def _joined(key: str, parts: list[Entry]) -> Entry:
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Entry(key, first.dtype, shape, _reading(lambda *tensors: torch.cat(tensors), *parts))


def _cut(entry: Entry, keys: list[str]) -> list[Entry]:
    rows = entry.shape[0] // len(keys)
    return [
        Entry(
            key, entry.dtype, (rows, *entry.shape[1:]), _reading(lambda t, at=at: t[at * rows : (at + 1) * rows], entry)
        )
        for at, key in enumerate(keys)
    ]


def _reshaped(entry: Entry, shape: tuple[int, ...]) -> Entry:
    return replace(entry, shape=shape, read=_reading(lambda tensor: tensor.reshape(shape), entry))


def _reading(compute: Callable[..., Tensor], *entries: Entry) -> Callable[[], Tensor]:
    return lambda: compute(*(entry.read() for entry in entries))


def _last(entry: Entry) -> str:
    return entry.key.rpartition(".")[2]


def as_token(entry: Entry) -> Entry:
    """VISSL's vector of masked patches, (1, D), as the token (1, 1, D) that it is here; any other entry as it is."""
    if not entry.key.endswith("patch_masking.masked_embed") or len(entry.shape) != 2:
        return entry
    return Entry(entry.key, entry.dtype, (1, *entry.shape), lambda: entry.read()[None])
