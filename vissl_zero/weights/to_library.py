"""Export of a trunk to a folder that another library opens: weights, configuration, and preprocessing of images.

The library itself opens every folder, and its outputs are compared with the trunk's before the export succeeds.

Formats: timm 1.0.31, ``timm/models/_hub.py`` (config.json); transformers 5.23, ``configuration_utils.py`` and
``image_processing_utils.py``.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.checkpoint.adapter_folder import write_adapters
from vissl_zero.checkpoint.foreign_layouts import HUGGING_FACE, Foreign, from_timm
from vissl_zero.checkpoint.shard_file import Entry, write_shard_file
from vissl_zero.checkpoint.torch_file import write_torch_file
from vissl_zero.data.pipeline import derive_eval_transforms
from vissl_zero.errors import CheckpointError
from vissl_zero.models.trunks.token_embedding import TokenEmbedding, interpolated
from vissl_zero.models.weight_names import is_adapters, to_other_names
from vissl_zero.resolve.channels import RGB
from vissl_zero.resolve.components import normalization
from vissl_zero.weights import to_detectron2 as d2
from vissl_zero.weights.library_index import models_of
from vissl_zero.weights.network_name import network_name
from vissl_zero.weights.recognition import Recognized, recognize

WEIGHTS, CONFIG, PREPROCESSOR, CARD = "model.safetensors", "config.json", "preprocessor_config.json", "README.md"
_TOLERANCE = 1e-4  # largest difference of features in float32, as a share of the largest feature
_PREFIX = "trunk."
_CLASSIFYING = ("timm", "torchvision", "onnx")
_ANY_CHANNELS = ("onnx", "safetensors")
_RESIZERS = ("timm", "transformers", "torchhub")  # each resizes position embeddings in its own way


@dataclass(frozen=True)
class Views:
    """The preprocessing of a trunk's images.

    Attributes:
        size: side of the square crop, in pixels.
        resize: length to which the shorter side is resized first.
        mean, std: mean and deviation of the normalization, a number for each channel.
    """

    size: int
    resize: int
    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Views:
        """Read the views from a DATA block: TRANSFORMS of evaluation, or those that TRAIN's imply."""
        transforms = data["TEST"]["TRANSFORMS"] or derive_eval_transforms(data["TRAIN"]["TRANSFORMS"])
        by_name = {entry["name"]: entry for entry in transforms}
        resize, crop = _side(by_name.get("Resize", {}).get("size")), _side(by_name.get("CenterCrop", {}).get("size"))
        size = crop or resize or 224
        return cls(size, resize or size, *normalization(transforms, data.get("IN_CHANNELS", RGB)))


def _side(size: Any) -> int:
    return int(max(size)) if isinstance(size, list | tuple) else int(size or 0)


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: folder of the files.
        call: Python code that opens the folder.
        difference: largest difference between features of the opened model and of the trunk, on random images.
        notes: sentences on what the folder lacks.
    """

    folder: Path
    call: str
    difference: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """A trunk to write.

    Attributes:
        trunk: trunk in evaluation mode on the CPU, which maps a list of images (B, C, H, W) to a list of features.
        config: ``MODEL.TRUNK`` of the trunk.
        views: views of evaluation.
        classifier: linear layer to write too; None: only the trunk.
        classes: names of the classifier's classes; empty if they are unknown.
        place: where the written folder will lie, for settings that name files; None: where it is written.
    """

    trunk: nn.Module
    config: Mapping[str, Any]
    views: Views
    classifier: nn.Linear | None = None
    classes: Sequence[str] = ()
    place: Path | None = None

    def outputs(self, images: Tensor) -> Tensor:
        """Compute features (B, F) of images (B, C, H, W), or the classifier's scores."""
        rows: Tensor = self.trunk([images])[0]
        return rows if self.classifier is None else self.classifier(rows)

    def images(self, count: int, side: int) -> Tensor:
        """Draw images (count, C, side, side), the same in each call."""
        # Noise, since constant images would hide wrong positions and swapped channels.
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, len(self.views.mean), side, side, generator=generator)

    @property
    def named_classes(self) -> dict[str, Any]:
        """Entries on the classes for a library's configuration; empty if their names are unknown."""
        return {"classes": list(self.classes)} if self.classes else {}

    def classifier_entries(self, name: str) -> list[Entry]:
        """Return the classifier's tensors under the layer name ``name``; empty without a classifier."""
        state = {} if self.classifier is None else self.classifier.state_dict()
        return [Entry.of(f"{name}.{kind}", tensor) for kind, tensor in state.items()]

    @property
    def is_adapted(self) -> bool:
        """Check whether the trunk has LoRA adapters."""
        return any(map(is_adapters, self.trunk.state_dict()))

    def merged(self) -> Source:
        """Return the source with its adapters, if it has any, merged into the weights."""
        if not self.is_adapted:
            return self
        from vissl_zero.models.lora import merged

        return replace(self, trunk=merged(self.trunk))

    def of_size(self, side: int) -> Source:
        """Return the source with positions for images of ``side`` pixels, if libraries resize them differently.

        DINO and DINOv2 resize with an offset, transformers without antialiasing, and timm with antialiasing alone.
        """
        trunk = copy.deepcopy(self.trunk)
        embedding = next((module for module in trunk.modules() if isinstance(module, TokenEmbedding)), None)
        if embedding is None or embedding.pos_embed is None or embedding.position_resize == "antialiased":
            return self
        height, width = (side // patch for patch in embedding.patch_embed.patch_size)
        if (height, width) == embedding.grid_size:
            return self
        num_prefix, positions = embedding.num_prefix_positions, embedding.pos_embed.detach()
        resized = interpolated(
            positions[:, num_prefix:], embedding.grid_size, (height, width), embedding.position_resize
        )
        # Resized once, by our rule: no library then has to resize at this size.
        embedding.pos_embed = nn.Parameter(torch.cat([positions[:, :num_prefix], resized], dim=1))
        embedding.grid_size = height, width
        config = copy.deepcopy(dict(self.config))
        if args := config.get("PARAMS", {}).get("model_args"):
            args["img_size"] = side
        return replace(self, trunk=trunk, config=config)

    def entries(self, style: str) -> list[Entry]:
        """Return the trunk's tensors under timm's or torchvision's names.

        Raises:
            CheckpointError: the library has no name for a tensor.
        """
        state = {f"{_PREFIX}{name}": tensor for name, tensor in self.trunk.state_dict().items()}
        if style == "torchvision" and self.config["NAME"].startswith("torchvision/"):
            return [Entry.of(_in_library(name), tensor.contiguous()) for name, tensor in state.items()]
        renamed = to_other_names(state, style)
        if renamed.unknown:
            raise CheckpointError(
                f"{style} has no such network: no name for {renamed.unknown[0].removeprefix(_PREFIX)} of a "
                f"{network_name(self.config)}. --to safetensors and --to onnx take every trunk."
            )
        return [Entry.of(new, state[old].contiguous()) for new, old in renamed.names.items()]


def _in_library(name: str) -> str:
    """Return the library's name of a tensor in a trunk of units (``trunk.net.features.0.unit.0.weight``)."""
    return ".".join(part for part in name.removeprefix(f"{_PREFIX}net.").split(".") if part != "unit")


def write(source: Source, target: str, folder: Path) -> Exported:
    """Write a trunk for another library, open it there, and compare the outputs.

    Args:
        source: trunk to write.
        target: one of ``TARGETS``.
        folder: an existing, empty folder.
    Raises:
        CheckpointError: the library has no such network, is not installed, or computes different outputs.
    """
    if source.classifier is not None and target not in _CLASSIFYING:
        raise CheckpointError(f"--classifier: goes with --to {', '.join(_CLASSIFYING)}, not with --to {target}.")
    channels = len(source.views.mean)
    if channels != RGB and target not in _ANY_CHANNELS:
        raise CheckpointError(
            f"--to {target}: takes networks for images of {RGB} channels, and this one is for {channels}. "
            f"--to {' and '.join(_ANY_CHANNELS)} take every trunk."
        )
    side = _whole(source)
    merged = source if target == "peft" else source.merged()
    written = merged.of_size(side) if target in _RESIZERS else merged
    call, opened, notes = TARGETS[target](written, folder)
    if written is not merged:
        notes = [*notes, f"Position embeddings are those of images of {side} pixels."]
    images = source.images(2, side)
    with torch.no_grad():
        wanted, got = source.outputs(images), opened(images)
    difference = float((wanted - got).abs().max())
    if got.shape != wanted.shape or difference > _TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise CheckpointError(
            f"{target} opens the folder, and for images of {side} pixels its outputs differ from those of the network, "
            f"{network_name(source.config)}, by {difference:.2g}: not written. --to safetensors keeps everything."
        )
    return Exported(folder, call, difference, notes)


def _whole(source: Source) -> int:
    """Return the side of images for the comparison: that of evaluation, rounded to whole patches."""
    patch = getattr(source.trunk, "patch_size", (1, 1))[0]
    return max(patch, source.views.size // patch * patch)


Opened = Callable[[Tensor], Tensor]


def _to_timm(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    entries = source.entries("timm")
    network = _in_timm(source, entries)
    architecture = network.trunk["NAME"].removeprefix("timm/")
    params = network.trunk.get("PARAMS", {})
    views, args = source.views, dict(params.get("model_args", {}))
    pretrained = {"input_size": [3, views.size, views.size], "fixed_input_size": False, "interpolation": "bilinear"}
    pretrained |= {"crop_pct": views.size / views.resize, "mean": list(views.mean), "std": list(views.std)}
    num_classes = 0 if source.classifier is None else source.classifier.out_features
    pretrained |= {"num_classes": num_classes, "crop_mode": "center"}
    feature_dim = int(source.trunk.feature_dim)  # type: ignore[arg-type]
    config = {"architecture": architecture, "num_classes": num_classes, "num_features": feature_dim}
    config |= {"label_names": list(source.classes)} if source.classes else {}
    config["pretrained_cfg"] = pretrained
    entries = [Entry(_timms(e.key), e.dtype, e.shape, e.read) for e in entries]
    if num_classes:
        entries += source.classifier_entries(_classifier_in_timm(architecture, args, num_classes))
    write_shard_file(folder / WEIGHTS, entries, {"format": "pt"}, with_checksums=False)
    call = f'timm.create_model("local-dir:{folder.name}", pretrained=True)'
    return call, _opened_by_timm(folder, config, args), []


def _classifier_in_timm(architecture: str, args: Mapping[str, Any], num_classes: int) -> str:
    """Return the name of a timm model's last layer."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=num_classes, **args)
    last: Any = model.get_classifier()  # type: ignore[operator]
    name = next((name for name, module in model.named_modules() if module is last), None)
    if name is None or not isinstance(last, nn.Linear):
        raise CheckpointError(
            f"timm's {architecture} does not end in one linear layer. --to onnx takes every classifier."
        )
    return name


def _opened_by_timm(folder: Path, config: Mapping[str, Any], args: Mapping[str, Any]) -> nn.Module:
    """Write ``config.json``, for images of any size if the model takes them, and open the folder."""
    import timm

    for sizes in ({"dynamic_img_size": True}, {}):
        _write_json(folder / CONFIG, {**config, "model_args": {**args, **sizes}})
        try:
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
    raise AssertionError


def _timms(name: str) -> str:
    return "reg_token" if name == "register_tokens" else name


def _in_timm(source: Source, entries: list[Entry]) -> Recognized:
    """Return timm's model from which the trunk was built, or which has the same tensors."""
    name, params = source.config["NAME"], source.config.get("PARAMS", {})
    if name.startswith("timm/"):
        return Recognized(network_name(source.config), {"NAME": name, "PARAMS": params})
    if name == "resnet":
        candidates = [model for model in models_of({e.key: e.shape for e in entries}) if model.startswith("timm/")]
        if candidates:
            return Recognized(candidates[0], {"NAME": candidates[0]})
    network = recognize(Foreign("", entries))
    if not network.trunk["NAME"].startswith("timm/"):
        other = next((model for model in network.others if model.startswith("timm/")), "")
        if not other:
            raise CheckpointError(
                f"timm has no model like this one: {network.text}. --to safetensors takes every trunk."
            )
        return Recognized(other, {"NAME": other})
    if name == "vision_transformer":
        pool = source.config["VISION_TRANSFORMERS"].get("CLASSIFIER", "token")
        args = network.trunk["PARAMS"]["model_args"]
        has_class = args["class_token"]
        args["global_pool"] = "token" if pool == "token" and has_class else "avg"
    return network


def _to_torchvision(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    import torchvision

    entries = source.entries("torchvision")
    name = source.config["NAME"]
    shapes = {entry.key: entry.shape for entry in entries}
    options: dict[str, Any] = {}
    if name.startswith("torchvision/"):
        model, options = (
            name.removeprefix("torchvision/"),
            dict(source.config.get("PARAMS", {}).get("model_args") or {}),
        )
    else:
        candidates = [one for one in models_of(shapes) if one.startswith("torchvision/")]
        if not candidates:
            raise CheckpointError(
                f"torchvision has no model like this one: {network_name(source.config)}. --to safetensors takes every "
                "trunk."
            )
        model = candidates[0].removeprefix("torchvision/")
    net = torchvision.models.get_model(model, weights=None, **options)
    last = nn.Identity() if source.classifier is None else copy.deepcopy(source.classifier)
    classifier = _with_last(net, last)
    entries += source.classifier_entries(classifier)
    net.load_state_dict({entry.key: entry.read() for entry in entries})
    write_torch_file(folder / f"{model}.pth", entries)
    config = {"model": model, "model_args": options, "classifier": classifier}
    _write_json(folder / CONFIG, config | source.named_classes)
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    built = "Identity()" if source.classifier is None else _built(source.classifier)
    call = f'torchvision.models.get_model("{model}"{arguments}); model.{classifier} = torch.nn.{built}; '
    return call + f'model.load_state_dict(torch.load("{folder.name}/{model}.pth"))', net.eval(), []


def _built(layer: nn.Linear) -> str:
    without = "" if layer.bias is not None else ", bias=False"
    return f"Linear({layer.in_features}, {layer.out_features}{without})"


def _with_last(net: nn.Module, last: nn.Module) -> str:
    """Put ``last`` in the place of the last linear layer. Return its name."""
    name = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, last)
    return name


def _to_detectron2(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    """Write ``model.pkl``; as detectron2 is not among our packages, timm or torchvision computes with what is in it."""
    entries = source.entries("torchvision" if source.config["NAME"].startswith("torchvision/") else "timm")
    shapes = {entry.key: entry.shape for entry in entries}
    tensors = {entry.key: entry.read() for entry in entries}
    if "pos_embed" in shapes:
        return _transformer_to_detectron2(source, folder, entries, tensors)
    names = d2.resnet_names(list(shapes))
    settings = d2.resnet_settings(shapes)
    d2.write_model(folder / d2.MODEL, {new: tensors[old] for old, new in names.items()})
    pixels = {
        # detectron2 normalizes pixels from 0 to 255, and reads BGR unless it is told.
        f"PIXEL_{name}": [255 * value for value in values]
        for name, values in (("MEAN", source.views.mean), ("STD", source.views.std))
    }
    # detectron2 looks for a relative path from where it runs.
    model = {"WEIGHTS": str((source.place or folder).absolute() / d2.MODEL), **pixels, "RESNETS": settings}
    _write_json(folder / d2.SETTINGS, {"MODEL": model, "INPUT": {"FORMAT": "RGB"}})  # JSON is YAML
    kept = d2.read_model(folder / d2.MODEL)
    call = "from detectron2.config import get_cfg; cfg = get_cfg(); "
    notes = [
        "Merge it after a configuration of detectron2, such as COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml.",
        f"{d2.SETTINGS} names the weights by where they were written: correct MODEL.WEIGHTS if the folder is moved.",
    ]
    written = {old: kept[new] for old, new in names.items()}
    return call + f'cfg.merge_from_file("{folder.name}/{d2.SETTINGS}")', _torchvisions_resnet(written, settings), notes


def _torchvisions_resnet(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Opened:
    """Build torchvision's ResNet without classifier of detectron2's settings."""
    import torchvision

    groups = {"groups": settings.get("NUM_GROUPS", 1), "width_per_group": settings.get("WIDTH_PER_GROUP", 64)}
    net = torchvision.models.get_model(f"resnet{settings['DEPTH']}", weights=None, **groups)
    _with_last(net, nn.Identity())
    lost = net.load_state_dict(tensors, strict=False)
    # Not strict, because detectron2's format has no counters. Nothing else may be missing.
    assert all(name.endswith("num_batches_tracked") for name in lost.missing_keys), lost
    return net.eval()


def _transformer_to_detectron2(
    source: Source, folder: Path, entries: list[Entry], tensors: Mapping[str, Tensor]
) -> tuple[str, Opened, list[str]]:
    prefix = "backbone.net."
    d2.write_model(
        folder / d2.MODEL, {f"{prefix}{name}": tensor for name, tensor in d2.transformer_tensors(tensors).items()}
    )
    kept = {name.removeprefix(prefix): value for name, value in d2.read_model(folder / d2.MODEL).items()}
    heads: Any = next(module.num_heads for module in source.trunk.modules() if hasattr(module, "num_heads"))
    settings = d2.transformer_settings({name: value.shape for name, value in kept.items()}, heads)
    trunk = copy.deepcopy(source.trunk)
    state = trunk.state_dict()
    for name, old in to_other_names([f"{_PREFIX}{key}" for key in state], "timm").names.items():
        values = kept.get(name)
        state[old.removeprefix(_PREFIX)] = values if values is not None else _one_if_scale(name, tensors[name])
    trunk.load_state_dict(state)
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    notes = [
        f"Of a configuration of ViTDet, set these of model.backbone.net: {arguments}.",
        "detectron2's transformer has no class token and no last norm. Layer scales are in the layers before them.",
    ]
    return f'train.init_checkpoint = "{folder.name}/{d2.MODEL}"', lambda images: trunk([images])[0], notes


def _one_if_scale(name: str, tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor) if name.endswith(".gamma") else tensor


_HF_KINDS = {
    "vit": ("vit", "ViTModel"),
    "dinov2": ("dinov2", "Dinov2Model"),
    "registers": ("dinov2_with_registers", "Dinov2WithRegistersModel"),
}


def _to_transformers(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    timm_entries = source.entries("timm")
    network = _in_timm(source, timm_entries)
    args = network.trunk.get("PARAMS", {}).get("model_args", {})
    shapes = {_timms(entry.key): entry.shape for entry in timm_entries}
    if "blocks.0.norm1.weight" not in shapes or "pos_embed" not in shapes:
        raise CheckpointError(
            f"--to transformers: takes plain vision transformers, and this is a {network.text}. --to timm, "
            "torchvision, onnx and safetensors take others."
        )
    kind = "vit" if "blocks.0.ls1.gamma" not in shapes else "registers" if "reg_token" in shapes else "dinov2"
    heads = next(module.num_heads for module in source.trunk.modules() if hasattr(module, "num_heads"))
    config = _hf_config(kind, shapes, args | {"num_heads": heads}, network, source.views)
    entries = [Entry(_timms(e.key), e.dtype, e.shape, e.read) for e in timm_entries]
    # ViTModel has a mask token only when it is built for masked images.
    entries = [e for e in entries if kind != "vit" or e.key != "mask_token"]
    entries_there, unknown = from_timm(entries, HUGGING_FACE)
    if unknown:
        raise CheckpointError(f"--to transformers: {config['architectures'][0]} has no place for {unknown[0]}.")
    _write_json(folder / CONFIG, config)
    write_shard_file(folder / WEIGHTS, entries_there, {"format": "pt"}, with_checksums=False)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    # Else ViTModel adds a pooler with random weights.
    options: dict[str, Any] = {"add_pooling_layer": False} if kind == "vit" else {}
    model = transformers.AutoModel.from_pretrained(folder, **options).eval()
    # ViTModel refuses images of another size than its own; DINOv2's classes always interpolate.
    extra: dict[str, Any] = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    call = f'transformers.AutoModel.from_pretrained("{folder.name}"{", add_pooling_layer=False" * (kind == "vit")})'
    notes = ["Features are last_hidden_state[:, 0], the class token after the last norm."]
    return call, lambda images: model(images, **extra).last_hidden_state[:, 0], notes


def _hf_config(
    kind: str, shapes: Mapping[str, tuple[int, ...]], args: Mapping[str, Any], network: Recognized, views: Views
) -> dict[str, Any]:
    width, patch = shapes["patch_embed.proj.weight"][0], shapes["patch_embed.proj.weight"][-1]
    inner, hidden = shapes["blocks.0.mlp.fc1.weight"][0], shapes["blocks.0.mlp.fc2.weight"][1]
    model_type, architecture = _HF_KINDS[kind]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture], "hidden_size": width}
    depth = sum(name.endswith(".norm1.weight") for name in shapes)
    config |= {"num_hidden_layers": depth, "num_attention_heads": args["num_heads"], "patch_size": patch}
    config |= {"image_size": args.get("img_size") or views.size, "qkv_bias": "blocks.0.attn.qkv.bias" in shapes}
    config |= {"layer_norm_eps": network.trunk.get("PARAMS", {}).get("layer_norm_eps") or 1e-6, "hidden_act": "gelu"}
    is_gated = inner == 2 * hidden
    if kind == "vit":
        return config | {"intermediate_size": inner}
    # With a gated MLP, transformers takes two thirds of the ratio itself; published networks have 4.
    config |= {"mlp_ratio": 4 if is_gated else inner / width, "use_swiglu_ffn": is_gated}
    if not is_gated and inner % width == 0:
        config["mlp_ratio"] = inner // width
    return config | ({"num_register_tokens": shapes["reg_token"][1]} if kind == "registers" else {})


_HUBCONF = '''"""Opened by torch.hub: model = torch.hub.load("{name}", "trunk", source="local")."""

dependencies = ["timm"]


def trunk(pretrained=True):
    """The trunk: images (B, 3, H, W), normalized as preprocessor_config.json says, to features (B, {dim})."""
    from pathlib import Path

    import timm

    return timm.create_model(f"local-dir:{{Path(__file__).parent}}", pretrained=pretrained)
'''


def _to_torchhub(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    _to_timm(source, folder)
    text = _HUBCONF.format(name=folder.name, dim=source.trunk.feature_dim)
    (folder / "hubconf.py").write_text(text, encoding="utf-8")
    model = torch.hub.load(str(folder), "trunk", source="local").eval()
    return f'torch.hub.load("{folder.name}", "trunk", source="local")', model, []


def _to_safetensors(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    state = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in source.trunk.state_dict().items()}
    entries = [Entry.of(name, tensor) for name, tensor in state.items()]
    write_shard_file(folder / WEIGHTS, entries, {"format": "pt"}, with_checksums=True)
    mean, std = list(source.views.mean), list(source.views.std)
    views = {"size": source.views.size, "channels": len(mean), "mean": mean, "std": std}
    _write_json(folder / CONFIG, {"vissl_zero": {"TRUNK": dict(source.config), "views": views}})
    return f'vissl_zero.load_trunk("{folder.name}")', source.outputs, ["The names of tensors are vissl_zero's."]


class _OneTensor(nn.Module):
    """A trunk with its classifier, if it has one, as a module from one tensor to one tensor."""

    def __init__(self, source: Source):
        super().__init__()
        self.trunk, self.last = source.trunk, source.classifier or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.trunk([images])[0])
        return outputs


def _to_peft(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    if not source.is_adapted:
        raise CheckpointError(
            "--to peft: takes runs with MODEL.LORA, and this trunk has no adapters. --to timm, torchvision and "
            "safetensors take whole weights."
        )
    from peft import PeftModel

    from vissl_zero.models.lora import unadapted

    library = "torchvision" if source.config["NAME"].startswith("torchvision/") else "timm"
    base: Any
    with tempfile.TemporaryDirectory() as temporary:
        # The base goes into a folder that is deleted: an adapter is published without it.
        _, base, _ = TARGETS[library](replace(source, trunk=unadapted(source.trunk)), Path(temporary))
        config = json.loads((Path(temporary) / CONFIG).read_text(encoding="utf-8"))
    write_adapters(source.trunk, folder)
    model = PeftModel.from_pretrained(base, folder).eval()
    arguments = "".join(f", {key}={value!r}" for key, value in config["model_args"].items())
    network = f'timm.create_model("{config.get("architecture")}", num_classes=0{arguments})'
    if library == "torchvision":
        network = f'torchvision.models.get_model("{config["model"]}"{arguments}), without {config["classifier"]},'
    notes = [f"base is {network} with the weights that the run began with."]
    return f'peft.PeftModel.from_pretrained(base, "{folder.name}")', model, notes


def _to_onnx(source: Source, folder: Path) -> tuple[str, Opened, list[str]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"--to onnx needs {error.name}: pip install 'vissl-zero[export]'.") from error
    side, path = _whole(source), folder / "model.onnx"
    shape, output = {0: torch.export.Dim.DYNAMIC}, "features" if source.classifier is None else "scores"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own internals; what comes out is compared below
        program = torch.onnx.export(
            _OneTensor(source).eval(),
            # Two images: torch.export fixes a dimension of size 1.
            (source.images(2, side),),
            dynamo=True,
            dynamic_shapes=(shape,),
            input_names=["images"],
            output_names=[output],
            verbose=False,
        )
    assert program is not None
    program.save(str(path))
    config = {"input": "images", "output": output, "image_size": side}
    _write_json(folder / CONFIG, config | source.named_classes)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    run = partial(_on_onnxruntime, session)
    single = source.images(1, side)  # another batch than that of the export
    with torch.no_grad():
        torch.testing.assert_close(run(single), source.outputs(single), rtol=1e-3, atol=1e-3)
    notes = [f"Batches of any size, images of {side} x {side} pixels."]
    return f'onnxruntime.InferenceSession("{folder.name}/model.onnx")', run, notes


def _on_onnxruntime(session: Any, images: Tensor) -> Tensor:
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


TARGETS: dict[str, Callable[[Source, Path], tuple[str, Opened, list[str]]]] = {
    "timm": _to_timm,
    "transformers": _to_transformers,
    "torchvision": _to_torchvision,
    "torchhub": _to_torchhub,
    "detectron2": _to_detectron2,
    "peft": _to_peft,
    "onnx": _to_onnx,
    "safetensors": _to_safetensors,
}


def write_preprocessor(views: Views, folder: Path) -> None:
    """Write the preprocessing of images for transformers' AutoImageProcessor."""
    config: dict[str, Any] = {"image_processor_type": "BitImageProcessor", "do_resize": True}
    config["do_convert_rgb"] = len(views.mean) == RGB
    config |= {"size": {"shortest_edge": views.resize}, "resample": 2, "do_center_crop": True}
    config |= {"crop_size": {"height": views.size, "width": views.size}, "do_rescale": True, "rescale_factor": 1 / 255}
    config |= {"do_normalize": True, "image_mean": list(views.mean), "image_std": list(views.std)}
    _write_json(folder / PREPROCESSOR, config)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
