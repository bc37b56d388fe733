"""Rename weights of transformers and facebookresearch to timm's names: ConvNeXt 1 and 2, ResNet and DINOv3.

timm's DINOv3 is its ``Eva``, where queries, keys and values are one layer with a bias for queries and values only.

Sources: transformers 5.23, ``models/{convnext,convnextv2,resnet,dinov3_vit,dinov3_convnext}``; facebookresearch/dinov3
54694f7, ``dinov3/models/vision_transformer.py`` and ``dinov3/layers``; timm 1.0.31, ``models/eva.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vissl_zero.checkpoint.shard_file import Entry

# Pattern of a full name -> timm's name; the first match counts. A number after ``+`` is increased by 1.
_Rules = tuple[tuple[str, str], ...]

_CONVNEXT_PARTS = (
    (r"dwconv|depthwise_conv", "conv_dw"),
    (r"layernorm|layer_norm", "norm"),
    (r"pwconv1|pointwise_conv1", "mlp.fc1"),
    (r"pwconv2|pointwise_conv2", "mlp.fc2"),
    (r"grn", "mlp.grn"),
)
_STAGE = r"(?:model\.|encoder\.)?stages\.(\d+)\."
_CONVNEXT: _Rules = (
    (r"embeddings\.patch_embeddings\.(\w+)", r"stem.0.\1"),
    (r"embeddings\.layernorm\.(\w+)", r"stem.1.\1"),
    (r"(?:model\.)?stages\.0\.downsample_layers\.(\d)\.(\w+)", r"stem.\1.\2"),
    (rf"{_STAGE}downsampl(?:ing_layer|e_layers)\.(\d)\.(\w+)", r"stages.\1.downsample.\2.\3"),
    (rf"{_STAGE}layers\.(\d+)\.(?:layer_scale_parameter|gamma)", r"stages.\1.blocks.\2.gamma"),
    *((rf"{_STAGE}layers\.(\d+)\.(?:{old})\.(\w+)", rf"stages.\1.blocks.\2.{new}.\3") for old, new in _CONVNEXT_PARTS),
    (r"(?:layernorm|layer_norm)\.(\w+)", r"head.norm.\1"),
)
_RESNET: _Rules = (
    (r"embedder\.embedder\.convolution\.(\w+)", r"conv1.\1"),
    (r"embedder\.embedder\.normalization\.(\w+)", r"bn1.\1"),
    (rf"{_STAGE}layers\.(\d+)\.layer\.(\d)\.convolution\.(\w+)", r"layer+\1.\2.conv+\3.\4"),
    (rf"{_STAGE}layers\.(\d+)\.layer\.(\d)\.normalization\.(\w+)", r"layer+\1.\2.bn+\3.\4"),
    (rf"{_STAGE}layers\.(\d+)\.shortcut\.convolution\.(\w+)", r"layer+\1.\2.downsample.0.\3"),
    (rf"{_STAGE}layers\.(\d+)\.shortcut\.normalization\.(\w+)", r"layer+\1.\2.downsample.1.\3"),
)
# torchvision's ResNet as ``nn.Sequential(*list(resnet.children())[:-1])``, the backbone of lightly's examples.
_RESNET_CHILDREN: _Rules = (
    (r"0\.(\w+)", r"conv1.\1"),
    (r"1\.(\w+)", r"bn1.\1"),
    *((rf"{place}\.(\d+\..+)", rf"layer{place - 3}.\1") for place in (4, 5, 6, 7)),
)
_BLOCK = r"(?:model\.)?layer\.(\d+)\."
_DINOV3_HF: _Rules = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.patch_embeddings\.(\w+)", r"patch_embed.proj.\1"),
    (rf"{_BLOCK}attention\.([qkv])_proj\.(\w+)", r"blocks.\1.attn.\2.\3"),
    (rf"{_BLOCK}attention\.o_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (rf"{_BLOCK}layer_scale(\d)\.lambda1", r"blocks.\1.gamma_\2"),
    (rf"{_BLOCK}(norm\d)\.(\w+)", r"blocks.\1.\2.\3"),
    (rf"{_BLOCK}mlp\.gate_proj\.(\w+)", r"blocks.\1.mlp.fc1_g.\2"),
    (rf"{_BLOCK}mlp\.up_proj\.(\w+)", r"blocks.\1.mlp.fc1_x.\2"),
    (rf"{_BLOCK}mlp\.down_proj\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
)
_DINOV3: _Rules = (
    (r"storage_tokens", "reg_token"),
    (r"blocks\.(\d+)\.ls(\d)\.gamma", r"blocks.\1.gamma_\2"),
    (r"blocks\.(\d+)\.mlp\.w1\.(\w+)", r"blocks.\1.mlp.fc1_g.\2"),
    (r"blocks\.(\d+)\.mlp\.w2\.(\w+)", r"blocks.\1.mlp.fc1_x.\2"),
    (r"blocks\.(\d+)\.mlp\.w3\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
)
# A name that only one layout has -> the rules of this layout.
_LAYOUTS: dict[str, _Rules] = {
    "encoder.stages.0.layers.0.dwconv.weight": _CONVNEXT,
    "stages.0.layers.0.depthwise_conv.weight": _CONVNEXT,
    "embedder.embedder.convolution.weight": _RESNET,
    "4.0.conv1.weight": _RESNET_CHILDREN,
    "embeddings.patch_embeddings.weight": _DINOV3_HF,
    "storage_tokens": _DINOV3,
}


def renamed(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries with timm's names and layout, converted lazily; unchanged for other networks."""
    for mark, rules in _LAYOUTS.items():
        marks = [entry.key for entry in entries if f".{entry.key}".endswith(f".{mark}")]
        if marks:
            # The shortest: a network inside another one, such as a teacher, has a longer name.
            prefix = min(marks, key=len).removesuffix(mark).removesuffix("model.")
            translated = [replace(e, key=_new_name(e.key.removeprefix(prefix), rules)) for e in entries]
            if rules in (_DINOV3, _DINOV3_HF):
                return list(_fused(_without_plain_mlp(translated)))
            return list(map(_in_one_dimension, translated))
    return list(entries)


def _new_name(name: str, rules: _Rules) -> str:
    for old, new in rules:
        if match := re.fullmatch(old, name):
            # "+" marks numbers that are counted from 0 in the file and from 1 in timm.
            return re.sub(r"\+(\d+)", lambda number: str(int(number[1]) + 1), match.expand(new))
    return name


def _in_one_dimension(entry: Entry) -> Entry:
    """Flatten the weights of ConvNeXt V2's response normalization, (1, 1, 1, C) in transformers."""
    if ".grn." not in entry.key:
        return entry
    return replace(entry, shape=(math.prod(entry.shape),), read=lambda: entry.read().flatten())


def _without_plain_mlp(entries: list[Entry]) -> list[Entry]:
    """Rename the first layer of an MLP without a gate: ``up_proj`` in Hugging Face, ``fc1`` in timm."""
    if any(".fc1_g." in entry.key for entry in entries):
        return entries
    return [replace(entry, key=entry.key.replace(".fc1_x.", ".fc1.")) for entry in entries]


def _fused(entries: list[Entry]) -> Iterable[Entry]:
    """Yield entries with queries, keys and values fused as in timm: one weight, and biases without one for keys."""
    # A bias of the keys adds the same number to all logits of a query, which softmax cancels: DINOv3 masks it to 0.
    parts = {entry.key: entry for entry in entries if re.search(r"\.attn\.[qkv]\.weight$", entry.key)}
    for entry in entries:
        if match := re.fullmatch(r"(.+\.attn)\.([qkv])\.(weight|bias)", entry.key):
            start, part, kind = match.groups()
            if kind == "bias":
                yield replace(entry, key=f"{start}.{part}_bias")
            elif part == "q":
                yield Entry.joined(f"{start}.qkv.weight", [parts[f"{start}.{one}.weight"] for one in "qkv"])
        elif entry.key.endswith(".attn.qkv.bias"):
            start = entry.key.removesuffix(".qkv.bias")
            queries, _, values = entry.cut([f"{start}.{name}_bias" for name in "qkv"])
            yield from (queries, values)
        elif not entry.key.endswith(
            (".bias_mask", "rope_embed.periods", "local_cls_norm.weight", "local_cls_norm.bias")
        ):
            yield entry
