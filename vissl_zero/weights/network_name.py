"""The displayed name of a network: kind, depth, width and patches, because its class may name another network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vissl_zero.errors import counted

_SIZES = ("embed_dim", "depth", "num_heads", "patch_size")  # by which a transformer may differ from its class
_OF_REGNET = ("depth", "w_0", "w_a", "w_m", "group_width")


def network_name(trunk: Mapping[str, Any]) -> str:
    """Name the network of a trunk block.

    Args:
        trunk: ``MODEL.TRUNK``: NAME, PARAMS and the blocks of our trunks, as recognized or resolved.
    """
    name, args = str(trunk["NAME"]), _block(_block(trunk, "PARAMS"), "model_args")
    if name == "vision_transformer":
        return _of_our_transformer(_block(trunk, "VISION_TRANSFORMERS"))
    if name == "resnet":
        return _of_resnet(_block(trunk, "RESNETS"))
    if name == "regnet":
        block = _block(trunk, "REGNET")
        return str(block.get("name") or _with(name, {key: block[key] for key in _OF_REGNET if block.get(key)}))
    if name.startswith("timm/convnext") and {"depths", "dims"} <= args.keys():
        return f"ConvNeXt{' V2' * name.startswith('timm/convnextv2')}: {args['depths']} blocks of {args['dims']}"
    if name.startswith("timm/swin") and {"depths", "embed_dim", "window_size"} <= args.keys():
        return f"Swin: {args['depths']} blocks, width {args['embed_dim']}, windows of {args['window_size']}"
    if name.startswith("timm/vit") and args.keys() >= {*_SIZES}:
        kind = "DINOv3 vision transformer" if "dinov3" in name else "vision transformer"
        registers = args.get("reg_tokens") or args.get("num_reg_tokens") or 0
        return _of_transformer(kind, [args[key] for key in _SIZES], registers, args.get("img_size"))
    return _with(name, args)


def _with(name: str, sizes: Mapping[str, Any]) -> str:
    return f"{name} with {', '.join(f'{key} {value}' for key, value in sizes.items())}" if sizes else name


def _block(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = parent.get(key)
    return block if isinstance(block, Mapping) else {}


def _of_transformer(kind: str, sizes: Sequence[int], registers: int, size: Any) -> str:
    width, depth, heads, patch = sizes
    text = f"{kind}: {counted(depth, 'block')} of {width}, {counted(heads, 'head')}, patches of {patch}"
    text += f", {counted(registers, 'register')}" if registers else ""
    return text + (f", made for images of {size}" if size else "")


def _of_our_transformer(block: Mapping[str, Any]) -> str:
    keys = ("HIDDEN_DIM", "NUM_LAYERS", "NUM_HEADS", "PATCH_SIZE")
    if not block.keys() >= {*keys}:
        return "vision_transformer"
    sizes = [block[key] for key in keys]
    return _of_transformer("vision transformer", sizes, block.get("NUM_REGISTERS", 0), block.get("IMAGE_SIZE"))


def _of_resnet(block: Mapping[str, Any]) -> str:
    if "DEPTH" not in block:
        return "resnet"
    groups, width = block.get("GROUPS", 1), block.get("WIDTH_PER_GROUP", 64)
    multiplier = block.get("WIDTH_MULTIPLIER", 1)
    text = f"ResNet-{block['DEPTH']}" + (f", {groups} groups of {width}" if groups > 1 or width != 64 else "")
    return text + (f", {multiplier} times as wide" if multiplier != 1 else "")
