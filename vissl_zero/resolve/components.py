"""The resolved MODEL and LOSS blocks: every key of the chosen trunk, heads and loss, typed and filled in.

The value ``auto`` copies the trunk, the images and their size from the run that the initial weights come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from vissl_zero.atomic import is_folder, is_there, read_regular
from vissl_zero.config.block_data import declared_keys
from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.config.blocks.model_and_loss import Lora, Trunk, VisionTransformerBlock
from vissl_zero.config.catalog import source_of
from vissl_zero.config.components import builtin_keys, component_keys, typed_options
from vissl_zero.config.components.trunks import (
    TRUNK_BLOCKS,
    own_trunk_keys,
    trunk_component,
    trunk_params,
)
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.weights_name import scheme_of
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.lifetime import run_in_subprocess
from vissl_zero.registry import HEADS, LOSSES, METHODS, TRUNKS, WEIGHTS_READERS
from vissl_zero.resolve.channels import RGB
from vissl_zero.resolve.data_plan import names_like
from vissl_zero.resolve.saved import RESOLVED_FILE, read_saved, with_references


def trunk_options(trunk: Trunk) -> dict[str, Any]:
    """Return all keys of the chosen trunk. Raises ConfigError for keys that a user's trunk does not have."""
    if trunk.NAME in TRUNK_BLOCKS:
        return own_trunk_keys(trunk, builtin_keys("trunk")[trunk.NAME])
    keys = component_keys(TRUNKS, trunk_component(trunk.NAME))
    return typed_options(keys, trunk_params(trunk.NAME, trunk.PARAMS), "config.MODEL.TRUNK.PARAMS")


def takes_other_model(cfg: RunConfig) -> bool:
    """Check whether the loss learns from the model under DISTILLATION."""
    method = method_of(cfg.LOSS["name"])
    return method is not None and bool(method.takes_other_model(cfg))


def as_teacher(cfg: RunConfig) -> RunConfig:
    """Return a configuration whose MODEL is the teacher under DISTILLATION, so that rules can check the teacher."""
    teacher = cfg.DISTILLATION.TEACHER_MODEL
    model = type(cfg.MODEL)(TRUNK=teacher.TRUNK, HEAD=teacher.HEAD, INPUT_TYPE=teacher.INPUT_TYPE)
    model.WEIGHTS_INIT = teacher.WEIGHTS_INIT
    return replace(cfg, MODEL=model)


def head_options(cfg: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and all keys of each head. Raises ConfigError for wrong keys."""
    heads = []
    for index, (name, options) in enumerate(cfg.MODEL.HEAD.PARAMS):
        key = f"config.MODEL.HEAD.PARAMS[{index}][1]"
        heads.append((name, typed_options(component_keys(HEADS, name), options or {}, key)))
    return heads


def loss_options(cfg: RunConfig) -> dict[str, Any]:
    """Return all keys of the chosen loss, with the keys that other blocks decide. Raises ConfigError for wrong keys."""
    name = cfg.LOSS["name"]
    block: Any = cfg.LOSS.get(name) or {}
    schema = component_keys(LOSSES, name)
    written = declared_keys(asdict(block), schema) if is_dataclass(block) and not isinstance(block, type) else block
    options = typed_options(schema, written, f"config.LOSS.{name}")
    inferred = _inferred(cfg).items()
    # A written value gives way, with a note: VISSL's recipes repeat these numbers, and an override changes one place.
    return options | {key: value for key, (value, _) in inferred if value is not None}


def inferred_notes(cfg: RunConfig) -> list[str]:
    """Return a note for each key of the loss that differs from the block that decides it."""
    name, notes = cfg.LOSS["name"], []
    for key, (value, origin) in _inferred(cfg).items():
        written = getattr(cfg.LOSS[name], key)
        if written is not None and value is not None and written != value:
            notes.append(f"config.LOSS.{name}.{key}: {value} is used, taken from the {origin}, not {written}.")
    return notes


def method_of(loss: Any) -> Any:
    """Return the ``MethodSpec`` that a built-in loss belongs to; None for a user's loss."""
    specs = (METHODS.get(name).build() for name in METHODS)
    return next((spec for spec in specs if loss in spec.losses), None)


def _inferred(cfg: RunConfig) -> dict[str, tuple[Any, str]]:
    method = method_of(cfg.LOSS["name"])
    return method.inferred(cfg) if method else {}


AUTO = "auto"
_KEY = "config.MODEL.TRUNK.NAME"
# A limit, because the file may come from elsewhere, and is read into memory before anything is known about it.
_MAX_MANIFEST_BYTES = 2**28
_STEP = re.compile(r"step_\d{9,}")
# The keys that decide which images a split has. Batch sizes are not copied: the benchmark sets them.
_IMAGES = ("DATA_SOURCES", "DATA_PATHS", "SOURCE_PARAMS", "LABEL_SOURCES", "LABEL_PATHS", "DEFAULT_GRAY_IMG_SIZE")
# Transforms that set an image's size and range. The others are augmentations, which a benchmark does not use.
_KEPT = ("Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize")


def with_run_of_weights(cfg: RunConfig) -> RunConfig:
    """Return a copy of ``cfg`` with trunk and data filled in where they are ``auto``.

    Raises:
        ConfigError: no weights are named, or the run that they come from cannot be read.
    """
    wanted, path = _wanted(cfg), cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE
    if not wanted:
        if cfg.MODEL.LORA.USE_LORA and path and not scheme_of(path):
            run = saved_config(Path(path).expanduser())
            _lora(cfg, {} if run is None else run["MODEL"])  # raises if adapters would be scaled differently
        return cfg
    key = next(iter(wanted))
    if not path:
        fix = f"Write {_WEIGHTS}=<run folder, file, timm:<model> or hf:<repo>> (docs/weights.md), or another {key}."
        raise ConfigError(
            [Problem(_WEIGHTS, "", f"must name weights, as {key} is {AUTO} and takes what they have", fix)]
        )
    if problem := missing_weights(path):
        raise ConfigError([problem])
    saved = None if scheme_of(path) else saved_config(Path(path).expanduser())
    if saved is None:
        # In a subprocess: recognizing a network imports torch, which the launcher avoids.
        trunk = "" if _KEY in wanted else cfg.MODEL.TRUNK.NAME
        saved = run_in_subprocess(_network, path, cfg.MODEL.WEIGHTS_INIT.STATE_DICT_KEY_NAME, trunk)
        if lost := [name for name in wanted if name.endswith("DATA_SOURCES")]:
            must = f"needs a run folder or a checkpoint of one: {path} names no images"
            raise ConfigError([Problem(name, AUTO, must, wanted[name]) for name in lost])
    data = _with_data(cfg.DATA, saved["DATA"], path) if set(wanted) - {_KEY} else cfg.DATA
    model, lora = cfg.MODEL, _lora(cfg, saved["MODEL"])
    if _KEY in wanted:
        model = replace(model, TRUNK=trunk_of(model.TRUNK, saved["MODEL"]["TRUNK"]), LORA=lora)
        # The first layer sees as many channels as in the run; images must have them.
        if data.IN_CHANNELS == RGB and saved["MODEL"].get("IN_CHANNELS"):
            data = replace(data, IN_CHANNELS=saved["MODEL"]["IN_CHANNELS"])
    return replace(cfg, MODEL=model, DATA=data)


def _network(path: str, key: str, trunk: str) -> Mapping[str, Any]:
    """Return MODEL and DATA blocks for the network in a file of weights: its trunk and its transforms."""
    network: Mapping[str, Any] = WEIGHTS_READERS.get("network").build(path, key, trunk)
    return network


def _wanted(cfg: RunConfig) -> dict[str, str]:
    """Map each key whose value is ``auto`` to a hint: what to write instead."""
    chosen = {}
    if cfg.MODEL.TRUNK.NAME == AUTO:
        chosen[_KEY] = "Write the trunk, regnet or resnet, and its keys."
    for name, split in (("TRAIN", cfg.DATA.TRAIN), ("TEST", cfg.DATA.TEST)):
        fix = "Add +config/benchmark/data=folder (224 pixels), and the DATA_PATHS of your images."
        if _is_auto(split.DATA_SOURCES) and not split.DATA_PATHS:
            chosen[f"config.DATA.{name}.DATA_SOURCES"] = fix
        if _is_auto(split.TRANSFORMS):
            chosen[f"config.DATA.{name}.TRANSFORMS"] = fix
    return chosen


def left_to_weights(cfg: RunConfig) -> set[str]:
    """Return the keys that stand for, or change, what only the weights can say: their value is ``auto``."""
    values = {_KEY: [cfg.MODEL.TRUNK.NAME]}
    for name, split in (("TRAIN", cfg.DATA.TRAIN), ("TEST", cfg.DATA.TEST)):
        values[f"config.DATA.{name}.DATA_SOURCES"] = split.DATA_SOURCES
        values[f"config.DATA.{name}.TRANSFORMS"] = split.TRANSFORMS
    if _is_auto(cfg.DATA.TRAIN.TRANSFORMS):
        values["config.DATA.IMG_SIZE"] = [AUTO]  # it scales these transforms
    return {key for key, entries in values.items() if _is_auto(entries)}


def _is_auto(entries: Sequence[Any]) -> bool:
    return list(entries) in ([AUTO], [{"name": AUTO}])


def _with_data(data: Data, saved: Mapping[str, Any], path: str) -> Data:
    """Return ``data`` with the run's images and transforms wherever it is ``auto``.

    Paths that the user names imply their source.
    """
    # The saved run is data, not code: its ``${...}`` are not resolved with this process's environment.
    if any("${" in str(saved[name].get(key, "")) for name in ("TRAIN", "TEST") for key in _IMAGES):
        own_paths = data.TRAIN.DATA_PATHS and data.TEST.DATA_PATHS
        if not own_paths:
            must = f"must be named: the run at {path} took its paths from environment variables"
            fix = "Write config.DATA.TRAIN.DATA_PATHS=[...] config.DATA.TEST.DATA_PATHS=[...]."
            raise ConfigError([Problem("config.DATA.TRAIN.DATA_PATHS", str(data.TRAIN.DATA_PATHS), must, fix)])
    train = _with_images(data.TRAIN, saved["TRAIN"])
    # The user's own training images have other classes, so that the run's TEST images do not fit them.
    is_other = (_is_auto(data.TRAIN.DATA_SOURCES) and data.TRAIN.DATA_PATHS) or not _is_auto(data.TRAIN.DATA_SOURCES)
    test = _with_images(data.TEST, {} if is_other else saved["TEST"])
    if _is_auto(data.TRAIN.TRANSFORMS):
        train = replace(train, TRANSFORMS=_plain_views(saved["TRAIN"]["TRANSFORMS"]))
    if _is_auto(data.TEST.TRANSFORMS):
        # Other images may have other sizes. An empty list means: resize and crop as for TRAIN.
        is_runs = bool(test.DATA_SOURCES) and not is_other and not data.TEST.DATA_PATHS
        test = replace(test, TRANSFORMS=list(saved["TEST"]["TRANSFORMS"]) if is_runs else [])
    return replace(data, TRAIN=train, TEST=test)


def _with_images(split: Split, saved: Mapping[str, Any]) -> Split:
    if not _is_auto(split.DATA_SOURCES):
        return split
    if split.DATA_PATHS:
        return replace(split, DATA_SOURCES=[source_of(split.DATA_PATHS)])
    # If the saved run has no test images, TEST stays empty: ``resolve`` then holds out some of TRAIN's.
    filled = {key: saved[key] for key in _IMAGES if key in saved} or {"DATA_SOURCES": []}
    limit = split.DATA_LIMIT if split.DATA_LIMIT != -1 else saved.get("DATA_LIMIT", -1)
    return replace(split, **filled, DATA_LIMIT=limit)


def _plain_views(transforms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return TRAIN's transforms with one crop of the largest size and without augmentation of color or sharpness."""
    views: list[dict[str, Any]] = []
    for entry in transforms:
        if entry["name"] == "ImgPilToMultiCrop":
            size = max(entry["size_crops"])
            scales = entry.get("crop_scales") or []
            # torchvision's default range of scales.
            scale = scales[list(entry["size_crops"]).index(size)] if scales else [0.08, 1.0]
            views.append({"name": "RandomResizedCrop", "size": size, "scale": list(scale)})
        elif entry["name"] == "ImgPilToPatchesAndImage":
            scale = entry.get("crop_scale_image", [0.08, 1.0])
            views.append({"name": "RandomResizedCrop", "size": entry.get("crop_size_image", 224), "scale": list(scale)})
        elif entry["name"] in _KEPT:
            views.append(dict(entry))
    return views


def normalization(transforms: Sequence[Any], channels: int = RGB) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel by the last Normalize; 0 and 1 without one."""
    found = (entry for entry in reversed(transforms) if isinstance(entry, Mapping) and entry.get("name") == "Normalize")
    last = next(found, {"mean": [0.0], "std": [1.0]})
    # One number may stand for all channels.
    mean, std = (list(last[key]) * (channels if len(last[key]) == 1 else 1) for key in ("mean", "std"))
    return mean, std


def trunk_of(trunk: Trunk, saved: Mapping[str, Any]) -> Trunk:
    """Return ``trunk`` with the name and the keys of a saved configuration."""
    filled = dict[str, Any](NAME=str(saved.get("NAME", "")))
    for name in ("REGNET", "RESNETS", "VISION_TRANSFORMERS"):
        if isinstance(block := saved.get(name), Mapping):
            filled[name] = replace(getattr(trunk, name), **_known(block, type(getattr(trunk, name))))
    if isinstance(block := saved.get("PARAMS"), Mapping):
        is_timm = trunk_component(filled["NAME"]) != filled["NAME"]  # NAME is timm/<model>: it has the name already
        filled["PARAMS"] = {key: value for key, value in block.items() if not (is_timm and key == "name")}
    if trunk.VISION_TRANSFORMERS.USE_MASK_TOKEN:  # the method's need, whatever the weights were trained for
        if filled["NAME"] == "vision_transformer":
            filled["VISION_TRANSFORMERS"].USE_MASK_TOKEN = True
        elif trunk_component(filled["NAME"]) == "timm":
            filled["PARAMS"] = {**filled.get("PARAMS", {}), "use_mask_token": True}
            filled["VISION_TRANSFORMERS"] = VisionTransformerBlock()
    return replace(trunk, **filled)


def _lora(cfg: RunConfig, saved: Mapping[str, Any]) -> Lora:
    """Return the LoRA settings of the run that the weights come from, or the recipe's if that run has none.

    Raises:
        ConfigError: the recipe's settings differ from the run's.
    """
    block, saved_block = cfg.MODEL.LORA, saved.get("LORA")
    if not isinstance(saved_block, Mapping) or not saved_block.get("USE_LORA"):
        return block
    # The run has trained its adapter since: reading the initial one from its folder again would undo that.
    runs = replace(block, **{**_known(saved_block, Lora), "ADAPTER_FOLDER": block.ADAPTER_FOLDER})
    # Dropout may differ: it has no weights, and it does not change the function at evaluation.
    if block.USE_LORA and replace(block, LORA_DROPOUT=runs.LORA_DROPOUT) != runs:
        wanted = f"R: {runs.R}, LORA_ALPHA: {runs.LORA_ALPHA}, TARGET_MODULES: {runs.TARGET_MODULES}"
        must = f"must be as in the run that the weights are of, whose adapters are trained further: {{{wanted}}}"
        fix = "Write these, or give its merged weights (vissl-zero export <run> --to safetensors)."
        got = f"R: {block.R}, LORA_ALPHA: {block.LORA_ALPHA}, TARGET_MODULES: {block.TARGET_MODULES}"
        raise ConfigError([Problem("config.MODEL.LORA", got, must, fix)])
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    is_frozen = settings.EVAL_MODE_ON and (settings.FREEZE_TRUNK_ONLY or settings.FREEZE_TRUNK_AND_HEAD)
    if not block.USE_LORA and not (cfg.TEST_ONLY or is_frozen):
        must = "must be true: the weights come from a run with LoRA, and its trunk would stay frozen"
        fix = "Write true, or give the run's merged weights (vissl-zero export <run> --to safetensors)."
        raise ConfigError([Problem("config.MODEL.LORA.USE_LORA", "False", must, fix)])
    return block if block.USE_LORA else runs


_WEIGHTS = "config.MODEL.WEIGHTS_INIT.PARAMS_FILE"


def missing_weights(path: str, key: str = _WEIGHTS) -> Problem | None:
    """Return the problem of a path of weights that does not exist; None if it exists or is no local path."""
    if not path or scheme_of(path) or is_there(Path(path).expanduser()):
        return None
    must = "must name a run folder, a checkpoint or a file of weights that exists"
    hint = names_like(Path(path).expanduser().parent, Path(path).name).strip()
    return Problem(key, repr(path), must, hint or "Correct the path.")


def _known(values: Mapping[Any, Any], block: type[Any]) -> dict[str, Any]:
    # The run may be of another version, with keys that this one does not have.
    names = {field.name for field in fields(block)}
    return {str(key): value for key, value in values.items() if key in names}


def saved_config(path: Path) -> Mapping[str, Any] | None:
    """Return the configuration of the run at ``path`` (a run folder, a checkpoint or a file in it), or None."""
    folder = path if is_folder(path) else path.parent
    steps = [place for place in (folder, *folder.glob("checkpoints/step_*")) if _STEP.fullmatch(place.name)]
    # The folder of a checkpoint has no resolved file; its manifest has the configuration too.
    # The newest checkpoint first: a resumed run may have continued under a changed configuration.
    manifests = [(step / "manifest.json", _manifest) for step in sorted(steps, reverse=True)]
    for file, read in ((folder / RESOLVED_FILE, read_saved), *manifests):
        try:
            config = with_references(read(file)["config"])
            known = [config["MODEL"]["TRUNK"], config["DATA"]["TRAIN"], config["DATA"]["TEST"]]
        # The folder may have files of another program under these names. Then it is no run, which is no error yet.
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if all(isinstance(block, Mapping) for block in known):
            return dict(config)
    return None


def _manifest(path: Path) -> Any:
    return json.loads(read_regular(path, _MAX_MANIFEST_BYTES))["body"]["config"]
