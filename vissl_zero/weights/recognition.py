"""Recognition of the network in a file of weights: its ``MODEL.TRUNK``, from the names and shapes of tensors.

Attention heads and the epsilon of layer norms cannot be read from shapes; they come from the ``config.json`` next to
the file. Without it, heads are those of the published networks of the same width, most with 64 channels a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.errors import CheckpointError, counted
from vissl_zero.models.weight_names import plain_name
from vissl_zero.resolve.channels import RGB
from vissl_zero.weights.library_index import models_of
from vissl_zero.weights.network_name import network_name

Shapes = Mapping[str, tuple[int, ...]]
# Width -> heads of published transformers whose heads do not have 64 channels.
_HEADS = {1280: 16, 1152: 16, 1408: 16, 1664: 16, 4096: 32}
# transformers' activations -> timm's; "" is what timm's transformers have anyway.
_ACTIVATIONS = {"gelu": "", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= {"silu": "silu", "relu": "relu"}
_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_USUAL_SIZE = 224
# Names of a plain vision transformer, in timm's words, outside of its blocks and inside.
_OUTSIDE = re.compile(
    r"cls_token|reg_token|register_tokens|pos_embed|mask_token|patch_embed\.proj\.(?:weight|bias)"
    r"|(?:norm|fc_norm|norm_pre)\.(?:weight|bias)"
)
_NOT_THE_TRUNK = ("blocks.", "head", "fc.", "classifier.", "pooler.", "decoder", "dino_", "ibot_")
_INSIDE = re.compile(r"(?:norm[12]|attn\.(?:qkv|proj|q_norm|k_norm)|mlp\.fc[12])\.(?:weight|bias)|ls[12]\.gamma")


@dataclass(frozen=True)
class Recognized:
    """The network recognized in a file of weights.

    Attributes:
        text: description of the network, with its sizes.
        trunk: ``MODEL.TRUNK``: NAME and the keys of the trunk.
        size: side of the network's images, in pixels.
        mean, std: normalization of images; ImageNet's if the file has none.
        others: models of timm or torchvision with the same tensors.
    """

    text: str
    trunk: Mapping[str, Any]
    size: int = _USUAL_SIZE
    mean: Sequence[float] = field(default_factory=lambda: _IMAGENET["mean"])
    std: Sequence[float] = field(default_factory=lambda: _IMAGENET["std"])
    others: Sequence[str] = ()


def recognize(
    foreign: Foreign, model: str = "", preprocessing: Mapping[str, Any] | None = None, trunk: str = ""
) -> Recognized:
    """Find the network of weights.

    Args:
        foreign: the weights.
        model: name of the library's model (``timm/...``, ``torchvision/...``), if the weights have one; else empty.
        preprocessing: ``size``, ``mean`` and ``std``, as far as the library has them.
        trunk: ``MODEL.TRUNK.NAME`` if the user has chosen it: the weights may then be of no known network.
    Raises:
        CheckpointError: no known network has these tensors, and ``trunk`` names none.
    """
    shapes = {plain_name(entry.key): tuple(entry.shape) for entry in foreign.entries}
    stated = {**_stated(foreign.config), **(preprocessing or {})}
    # First, because a file that states its trunk needs no guess.
    if (recognized := _own(foreign.config)) is not None:
        return recognized
    try:
        network = _known(shapes, foreign, model or _architecture(foreign.config))
    except CheckpointError:
        if not trunk:
            raise
        network = _named(trunk)
    return Recognized(
        network.text,
        network.trunk,
        int(stated.get("size") or network.size),
        list(stated.get("mean") or network.mean),
        list(stated.get("std") or network.std),
        [other for other in network.others if other != network.trunk["NAME"]],
    )


def _known(shapes: Shapes, foreign: Foreign, model: str) -> Recognized:
    """Recognize a published network. Args and Raises: see ``recognize``."""
    network = _transformer(shapes, foreign) or _eva(shapes, foreign.config) or _resnet(shapes)
    network = network or _convnext(shapes, foreign.config) or _swin(shapes) or _indexed(shapes, model)
    if network is None:
        names = [entry.key for entry in foreign.entries]
        some = ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")
        raise CheckpointError(
            f"No network that is known here has the {counted(len(names), 'tensor')} {some}. Write the trunk: "
            "config.MODEL.TRUNK.NAME=timm/<model> or torchvision/<model>, or a run folder in place of the file."
        )
    return network


def _own(config: Mapping[str, Any]) -> Recognized | None:
    """Recognize a file of ``vissl-zero export --to safetensors``."""
    written = config.get("vissl_zero")
    trunk = written.get("TRUNK") if isinstance(written, Mapping) else None
    views = written.get("views") if isinstance(written, Mapping) else None
    if not isinstance(trunk, Mapping) or not isinstance(trunk.get("NAME"), str) or not isinstance(views, Mapping):
        return None
    params = trunk.get("PARAMS")
    plain = (
        {**trunk, "PARAMS": {k: v for k, v in params.items() if k != "name"}} if isinstance(params, Mapping) else trunk
    )
    size, channels = views.get("size"), views.get("channels")
    normalization = _normalization(views, channels if isinstance(channels, int) else RGB)
    return Recognized(network_name(trunk), plain, size if isinstance(size, int) else 224, *normalization)


def _normalization(views: Mapping[str, Any], channels: int = RGB) -> tuple[list[float], list[float]]:
    """Return mean and deviation of each channel; ImageNet's if the file has none."""
    numbers = []
    for values in (views.get("mean"), views.get("std")):
        if not isinstance(values, list) or not all(isinstance(x, int | float) for x in values):
            return _IMAGENET["mean"], _IMAGENET["std"]
        # One number may stand for all channels.
        numbers.append(values * channels if len(values) == 1 else values)
    mean, std = numbers
    return (mean, std) if len(mean) == len(std) == channels else (_IMAGENET["mean"], _IMAGENET["std"])


def _architecture(config: Mapping[str, Any]) -> str:
    """Read timm's name in the ``config.json`` that timm writes."""
    name = config.get("architecture")
    return f"timm/{name}" if isinstance(name, str) else ""


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read size and normalization from ``config.json`` (timm) or ``preprocessor_config.json`` (transformers)."""
    timm, hf = config.get("pretrained_cfg"), config.get("preprocessor")
    if isinstance(timm, Mapping):
        size = timm.get("input_size")
        return {"size": size[-1] if isinstance(size, list) else 0, "mean": timm.get("mean"), "std": timm.get("std")}
    if not isinstance(hf, Mapping):
        return {}
    size = hf.get("crop_size") if isinstance(hf.get("crop_size"), Mapping) else hf.get("size")
    side = size.get("height") or size.get("shortest_edge") if isinstance(size, Mapping) else size
    return {"size": side if isinstance(side, int) else 0, "mean": hf.get("image_mean"), "std": hf.get("image_std")}


def _number(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _heads(width: int, config: Mapping[str, Any]) -> int:
    heads = _number(config, "num_attention_heads") or _HEADS.get(width) or (0 if width % 64 else width // 64)
    if not heads or width % heads:
        raise CheckpointError(
            f"A vision transformer of width {width}: no published one has it, so its attention heads are not known. "
            "Put it into a folder of its own as pytorch_model.bin or model.safetensors, beside a config.json with "
            '{"num_attention_heads": ...}, and name the folder; or write config.MODEL.TRUNK.'
        )
    return int(heads)


def _depth(shapes: Shapes, pattern: str) -> int:
    return 1 + max((int(m[1]) for name in shapes if (m := re.match(pattern, name))), default=-1)


def _side(count: int) -> int:
    side = math.isqrt(count)
    return side if side * side == count else 0


def _transformer(shapes: Shapes, foreign: Foreign) -> Recognized | None:
    """Recognize a plain vision transformer of timm, DINO, DINOv2, MAE, iBOT, transformers or torchvision."""
    depth = _depth(shapes, r"blocks\.(\d+)\.attn\.qkv\.weight")
    patches, first = shapes.get("patch_embed.proj.weight"), shapes.get("blocks.0.mlp.fc1.weight")
    inside = [name.split(".", 2)[2] for name in shapes if name.startswith("blocks.")]
    decoder = any(name.startswith("decoder") for name in shapes)
    outside = [name for name in shapes if not name.startswith(_NOT_THE_TRUNK)]
    if not depth or not patches or not first or len(patches) != 4 or not all(map(_INSIDE.fullmatch, inside)):
        return None
    if "pos_embed" not in shapes or not all(map(_OUTSIDE.fullmatch, outside)) or ("reg_token" in shapes and decoder):
        return None
    width, patch = patches[0], patches[-1]
    is_hidden_by_name = {"register_tokens", "reg_token"} & shapes.keys()
    registers = sum(shapes[name][1] for name in is_hidden_by_name)
    has_class, count = "cls_token" in shapes, shapes["pos_embed"][1]
    # Positions are of all prefix tokens, of the class token alone, or of patches alone: one of them leaves a square
    # grid. timm knows the first and the last.
    prefix = next((n for n in (has_class + registers, int(has_class), 0) if _side(count - n)), None)
    if prefix is None or (prefix and prefix != has_class + registers):
        return None
    side = _side(count - prefix)
    # SwiGLU's first layer has gate and values side by side, and its last one takes half as many channels.
    is_gated = first[0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    args: dict[str, Any] = {"img_size": side * patch, "patch_size": patch, "embed_dim": width, "depth": depth}
    args |= {"num_heads": _heads(width, foreign.config), "mlp_ratio": _ratio(first[0], width), "reg_tokens": registers}
    args |= {"class_token": has_class, "no_embed_class": prefix == 0, "qkv_bias": "blocks.0.attn.qkv.bias" in shapes}
    args |= {"init_values": 1.0 if "blocks.0.ls1.gamma" in shapes else None, "pre_norm": "norm_pre.weight" in shapes}
    args |= {"qk_norm": "blocks.0.attn.q_norm.weight" in shapes}
    act = foreign.config.get("hidden_act", "gelu")
    if act not in _ACTIVATIONS:
        return None
    if not is_gated and _ACTIVATIONS[act]:
        args["act_layer"] = _ACTIVATIONS[act]
    # timm's models that pool patches norm after pooling, so the name of the norm tells how features are made.
    has_fc_norm = "fc_norm.weight" in shapes
    args |= {"global_pool": "token" if has_class and not has_fc_norm else "avg", "fc_norm": has_fc_norm}
    params: dict[str, Any] = {
        "model_args": {k: v for k, v in args.items() if v is not None},
        "position_resize": _position_resize(foreign, shapes),
    }
    if eps := _number(foreign.config, "layer_norm_eps") or (1e-5 if args["pre_norm"] else None):  # CLIP's
        params["layer_norm_eps"] = eps
    # By the MLP alone: all sizes are in ``model_args``. Of timm's plain transformers, DINOv2's giant has a gated one.
    name = "vit_giant_patch14_dinov2" if is_gated else f"vit_base_patch{patch if patch in (8, 16, 32) else 16}_224"
    if args["pre_norm"]:
        name = "vit_base_patch32_clip_224"  # with CLIP's epsilon in timm too, where layer_norm_eps is not known
    trunk = {"NAME": f"timm/{name}", "PARAMS": params}
    return Recognized(network_name(trunk), trunk, side * patch)


def _ratio(inner: int, width: int) -> float:
    ratio = inner / width
    # timm truncates ``width * ratio``, which rounding may leave just below the whole number.
    return ratio if int(width * ratio) == inner else (inner + 0.5) / width


def _position_resize(foreign: Foreign, shapes: Shapes) -> str:
    """Infer how the library that wrote the file resizes positions, as far as the layout tells whose it is."""
    kind, has_registers = foreign.config.get("model_type"), "register_tokens" in shapes
    if isinstance(kind, str):
        return "antialiased" if kind == "dinov2_with_registers" else "bicubic"
    is_hub = "mask_token" in shapes and "blocks.0.ls1.gamma" in shapes
    is_dino = "teacher" in foreign.layout
    return "offset" if (is_hub or is_dino) and not has_registers else "antialiased"


def _eva(shapes: Shapes, config: Mapping[str, Any]) -> Recognized | None:
    """Recognize DINOv3's vision transformer, timm's Eva with rotary positions."""
    depth, patches = _depth(shapes, r"blocks\.(\d+)\.attn\.qkv\.weight"), shapes.get("patch_embed.proj.weight")
    if (
        not depth
        or not patches
        or "pos_embed" in shapes
        or "reg_token" not in shapes
        or "blocks.0.gamma_1" not in shapes
    ):
        return None
    width, patch, registers = patches[0], patches[-1], shapes["reg_token"][1]
    is_gated = "blocks.0.mlp.fc1_g.weight" in shapes
    inner = shapes["blocks.0.mlp.fc1_g.weight" if is_gated else "blocks.0.mlp.fc1.weight"][0]
    args: dict[str, Any] = {"patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": _heads(width, config)}
    args |= {"mlp_ratio": _ratio(inner, width), "num_reg_tokens": registers, "global_pool": "token"}
    # 1 changes no width, but makes timm build the gate and the values as two layers, as DINOv3 has them.
    args |= {"qkv_bias": "blocks.0.attn.q_bias" in shapes, "swiglu_mlp": is_gated, "swiglu_align_to": 1}
    if config.get("hidden_act", "silu" if is_gated else "gelu") != ("silu" if is_gated else "gelu"):
        return None
    args |= {"rope_temperature": _number(config, "rope_theta") or 100.0}
    params = {"model_args": args, "layer_norm_eps": _number(config, "layer_norm_eps") or 1e-5}
    trunk = {"NAME": "timm/vit_small_patch16_dinov3", "PARAMS": params}
    return Recognized(network_name(trunk), trunk, int(_number(config, "image_size") or _USUAL_SIZE))


# Blocks of each stage, and convolutions of a block -> depth.
RESNET_DEPTHS: dict[tuple[int, ...], int] = {
    (2, 2, 2, 2, 2): 18,
    (3, 4, 6, 3, 2): 34,
    (3, 4, 6, 3, 3): 50,
    (3, 4, 23, 3, 3): 101,
    (3, 8, 36, 3, 3): 152,
    (3, 24, 36, 3, 3): 200,
}


def _resnet(shapes: Shapes) -> Recognized | None:
    """Recognize torchvision's, timm's and VISSL's ResNet, ResNeXt and wide ResNet of a published depth."""
    stem, last = shapes.get("conv1.weight"), shapes.get("layer1.0.conv2.weight")
    layers = tuple(_depth(shapes, rf"layer{stage}\.(\d+)\.conv1\.weight") for stage in range(1, 5))
    known = re.compile(
        r"(?:conv1|bn1|layer\d\.\d+\.(?:conv[123]|bn[123]|downsample\.[01]))\.\w+|(?:fc|head|last_linear)\..+"
    )
    is_wide = "layer1.0.conv3.weight" in shapes
    depth = RESNET_DEPTHS.get((*layers, 2 + is_wide), 0)
    if stem is None or stem[1:] not in ((3, 7, 7), (3, 3, 3)) or not depth or last is None:
        return None
    trunk_names = [n for n in shapes if not n.startswith(("heads.", "projection", "prototypes", "predictor"))]
    if not all(map(known.fullmatch, trunk_names)):
        return None
    multiplier, groups = stem[0] // 64, last[0] // last[1]
    options: dict[str, Any] = {"DEPTH": depth, "WIDTH_MULTIPLIER": max(1, multiplier), "GROUPS": groups}
    # Of the first stage, as torchvision counts it; each later stage doubles it.
    width = last[0] // groups // max(1, multiplier)
    options |= {"WIDTH_PER_GROUP": width, "STEM_TYPE": "RES_STEM_IN" if stem[-1] == 7 else "RES_STEM_CIFAR"}
    trunk = {"NAME": "resnet", "RESNETS": options}
    return Recognized(network_name(trunk), trunk)


def _convnext(shapes: Shapes, config: Mapping[str, Any]) -> Recognized | None:
    """Recognize ConvNeXt of any depth and width, in timm's names, first and second version."""
    depths = [_depth(shapes, rf"stages\.{stage}\.blocks\.(\d+)\.conv_dw\.weight") for stage in range(4)]
    if not all(depths) or len(shapes.get("stem.0.weight", ())) != 4 or "head.norm.weight" not in shapes:
        return None
    dims = [shapes[f"stages.{stage}.blocks.0.conv_dw.weight"][0] for stage in range(4)]
    patch, kernel = shapes["stem.0.weight"][-1], shapes["stages.0.blocks.0.conv_dw.weight"][-1]
    args: dict[str, Any] = {"depths": depths, "dims": dims, "patch_size": patch, "kernel_sizes": kernel}
    args |= {"conv_mlp": len(shapes["stages.0.blocks.0.mlp.fc1.weight"]) == 4}
    # ConvNeXt V2 has response normalization in place of layer scales (https://arxiv.org/abs/2301.00808, section 4).
    is_second = "stages.0.blocks.0.mlp.grn.weight" in shapes
    if "head.pre_logits.fc.weight" in shapes or is_second == ("stages.0.blocks.0.gamma" in shapes):
        return None
    params: dict[str, Any] = {"model_args": args}
    if config.get("model_type") in ("convnext", "convnextv2"):
        # transformers uses this epsilon in the last norm alone; its blocks have 1e-6, as timm's.
        params["last_norm_eps"] = _number(config, "layer_norm_eps") or 1e-12
    trunk = {"NAME": "timm/convnextv2_tiny" if is_second else "timm/convnext_tiny", "PARAMS": params}
    return Recognized(network_name(trunk), trunk)


def _swin(shapes: Shapes) -> Recognized | None:
    """Recognize Swin of any size, first version, in timm's names."""
    stages = 0
    while f"layers.{stages}.blocks.0.attn.relative_position_bias_table" in shapes:
        stages += 1
    if not stages or "patch_embed.norm.weight" not in shapes or "layers.0.downsample.norm.weight" in shapes:
        return None
    tables = [shapes[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"] for stage in range(stages)]
    depths = [_depth(shapes, rf"layers\.{stage}\.blocks\.(\d+)\.attn\.qkv\.weight") for stage in range(stages)]
    patches = shapes["patch_embed.proj.weight"]
    # The table has a row for each offset between two patches of a window, (2 w - 1)^2.
    window = (_side(tables[0][0]) + 1) // 2
    args: dict[str, Any] = {"embed_dim": patches[0], "depths": depths, "num_heads": [table[1] for table in tables]}
    # The published networks with windows of 12 are those for 384 pixels.
    size = 384 if window == 12 else _USUAL_SIZE
    args |= {"window_size": window, "patch_size": patches[-1], "img_size": size}
    trunk = {"NAME": "timm/swin_tiny_patch4_window7_224", "PARAMS": {"model_args": args}}
    return Recognized(network_name(trunk), trunk, size)


def _indexed(shapes: Shapes, model: str) -> Recognized | None:
    """Recognize a published model of timm or torchvision, by the names and shapes of all its tensors."""
    candidates = models_of(shapes)
    # Several models may have the same tensors, and the shortest name is the plainest. A name that the file states
    # decides.
    name = model if model in candidates or (model and not candidates) else next(iter(candidates), "")
    return _named(name, candidates) if name else None


def _named(name: str, others: Sequence[str] = ()) -> Recognized:
    size = re.search(r"_(\d{3})(?:\D|$)", name)
    return Recognized(name, {"NAME": name}, int(size[1]) if size else _USUAL_SIZE, others=others)
