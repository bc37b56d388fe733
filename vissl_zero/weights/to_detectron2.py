"""Export of a trunk to detectron2: a pickle of arrays with detectron2's names, and settings.

Names of ResNets as in MoCo's ``detection/convert-pretrain-to-detectron2.py`` and VISSL's
``extra_scripts/convert_vissl_to_detectron2.py``, without batch norm's counters, which detectron2's R-50.pkl lacks too.
Names of vision transformers: ``detectron2/modeling/backbone/vit.py``, in ViTDet's pyramid (``backbone.net.``).
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vissl_zero.errors import CheckpointError
from vissl_zero.weights.recognition import RESNET_DEPTHS

MODEL, SETTINGS = "model.pkl", "detectron2.yaml"
_STAT = r"(weight|bias|running_mean|running_var)"
_RESNET = (
    (r"conv1\.weight", "stem.conv1.weight"),
    (rf"bn1\.{_STAT}", r"stem.conv1.norm.\1"),
    (r"layer(\d)\.(\d+)\.conv([123])\.weight", r"res\1.\2.conv\3.weight"),
    (rf"layer(\d)\.(\d+)\.bn([123])\.{_STAT}", r"res\1.\2.conv\3.norm.\4"),
    (r"layer(\d)\.(\d+)\.downsample\.0\.weight", r"res\1.\2.shortcut.weight"),
    (rf"layer(\d)\.(\d+)\.downsample\.1\.{_STAT}", r"res\1.\2.shortcut.norm.\3"),
)
_TRANSFORMER = re.compile(
    r"pos_embed|patch_embed\.proj\.(weight|bias)"
    r"|blocks\.\d+\.(norm[12]|attn\.qkv|attn\.proj|mlp\.fc[12])\.(weight|bias)"
)
_NOT_TAKEN = re.compile(r"cls_token|mask_token|norm\.(weight|bias)|.+\.num_batches_tracked")
_SCALED = {"ls1": "attn.proj", "ls2": "mlp.fc2"}
_DEPTHS = (18, 34, 50, 101, 152)  # depths of detectron2's ResNets


def resnet_names(names: Sequence[str]) -> dict[str, str]:
    """Map torchvision's names of a ResNet to detectron2's, without batch norm's counters.

    Raises:
        CheckpointError: detectron2 has no such network.
    """
    renamed_names: dict[str, str] = {}
    for name in names:
        if _NOT_TAKEN.fullmatch(name):
            continue
        renamed = next((re.sub(old, new, name) for old, new in _RESNET if re.fullmatch(old, name)), "")
        if not renamed:
            raise _no_place(name)
        # detectron2 counts the stem as the first stage.
        renamed_names[name] = re.sub(r"^res(\d)", lambda match: f"res{int(match[1]) + 1}", renamed)
    return renamed_names


def _no_place(name: str) -> CheckpointError:
    return CheckpointError(
        f"--to detectron2: takes ResNets and plain vision transformers, and has no place for {name}. --to timm, "
        "torchvision, onnx and safetensors take others."
    )


def resnet_settings(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return ``MODEL.RESNETS`` of a ResNet with these shapes, by torchvision's names.

    Raises:
        CheckpointError: detectron2 has no ResNet of this depth or width.
    """
    stages = [{int(name.split(".")[1]) for name in shapes if name.startswith(f"layer{n}.")} for n in (1, 2, 3, 4)]
    num_convolutions = 2 + ("layer1.0.conv3.weight" in shapes)
    depth = RESNET_DEPTHS.get((*map(len, stages), num_convolutions))
    first, (width, per_group) = shapes["conv1.weight"][0], shapes["layer1.0.conv2.weight"][:2]
    groups = width // per_group
    if depth not in _DEPTHS or first != 64 or (num_convolutions == 2 and (width, groups) != (64, 1)):
        raise CheckpointError("--to detectron2: takes ResNets of depth 18, 34, 50, 101 and 152, and this is another.")
    # torchvision's networks, and ours, have the stride in the 3 x 3 convolution. detectron2's default is MSRA's.
    settings = {"DEPTH": depth, "STRIDE_IN_1X1": False}
    if num_convolutions == 2:
        # detectron2's default is a bottleneck's 256.
        return settings | {"RES2_OUT_CHANNELS": 64}
    return settings if (width, groups) == (64, 1) else settings | {"NUM_GROUPS": groups, "WIDTH_PER_GROUP": per_group}


def transformer_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of timm's plain vision transformer to ViTDet's; leave out the class token and the last norm.

    ViTDet's has no layer scales, so they are multiplied into the layers before them.

    Raises:
        CheckpointError: ViTDet's transformer has no counterpart of a tensor, such as of registers.
    """
    kept = dict(tensors)
    for name in [name for name in tensors if name.endswith(".gamma")]:
        block, kind, _ = name.rsplit(".", 2)
        gamma = kept.pop(name)
        for part in ("weight", "bias"):
            layer = f"{block}.{_SCALED[kind]}.{part}"
            kept[layer] = kept[layer] * (gamma[:, None] if part == "weight" else gamma)
    kept = {name: tensor for name, tensor in kept.items() if not _NOT_TAKEN.fullmatch(name)}
    if other := next((name for name in kept if not _TRANSFORMER.fullmatch(name)), ""):
        raise _no_place(other)
    return kept


def transformer_settings(shapes: Mapping[str, Sequence[int]], num_heads: int) -> dict[str, Any]:
    """Return the arguments of ``detectron2.modeling.ViT`` for these shapes, by timm's names."""
    (width, _, side, _), num_positions = shapes["patch_embed.proj.weight"], shapes["pos_embed"][1]
    grid = math.isqrt(num_positions)
    depth = sum(name.endswith(".norm1.weight") for name in shapes)
    settings: dict[str, Any] = {"patch_size": side, "embed_dim": width, "depth": depth, "num_heads": num_heads}
    settings |= {"mlp_ratio": shapes["blocks.0.mlp.fc1.weight"][0] / width, "pretrain_img_size": grid * side}
    settings |= {"pretrain_use_cls_token": grid * grid != num_positions}
    return settings | ({} if "blocks.0.attn.qkv.bias" in shapes else {"qkv_bias": False})


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors for ``DetectionCheckpointer``, which matches them with the model by the ends of names."""
    arrays = {name: tensor.detach().float().contiguous().numpy() for name, tensor in tensors.items()}
    content = {"model": arrays, "__author__": "vissl_zero", "matching_heuristics": True}
    with path.open("xb") as file:
        pickle.dump(content, file)


def read_model(path: Path) -> dict[str, Tensor]:
    """Read a file that ``write_model`` has just written; never other files, because a pickle may run code."""
    with path.open("rb") as file:
        return {name: torch.from_numpy(array) for name, array in pickle.load(file)["model"].items()}  # noqa: S301
