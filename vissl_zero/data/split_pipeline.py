"""The pipeline of a split, of TRAIN or of TEST, for the backend of the DATA block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vissl_zero.config.blocks.data import Data, split_of
from vissl_zero.data.channels import build_channel_pipeline
from vissl_zero.data.decode import Decoder
from vissl_zero.data.pipeline import Pipeline, build_pipeline, derive_eval_transforms
from vissl_zero.errors import ConfigError, Problem

_IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def build_eval_pipeline(data_cfg: Data) -> Pipeline:
    """Build the pipeline of TEST's TRANSFORMS; by default Resize, CenterCrop, ToTensor and Normalize.

    The default has the size of TRAIN's largest crops (no resizing if TRAIN has no size), and TRAIN's Normalize.
    """
    split = "TEST" if data_cfg.TEST.TRANSFORMS else "TRAIN"
    return _with_backend(data_cfg, eval_transforms(data_cfg), f"config.DATA.{split}.TRANSFORMS", on_device=False)


def eval_transforms(data_cfg: Data) -> Sequence[Mapping[str, Any]]:
    """Return the transforms of ``build_eval_pipeline``."""
    return data_cfg.TEST.TRANSFORMS or derive_eval_transforms(data_cfg.TRAIN.TRANSFORMS)


def described_views(data_cfg: Data) -> str:
    """Describe the transforms of ``build_eval_pipeline`` for people: sizes in pixels, mean and standard deviation."""
    return ", ".join(text for entry in eval_transforms(data_cfg) if (text := _in_words(entry)))


def _in_words(entry: Mapping[str, Any]) -> str:
    name, size = entry["name"], entry.get("size")
    sides = list(size) if isinstance(size, Sequence) else [size]
    if name == "ToTensor":
        return ""
    if name == "Resize":
        how = f" ({entry['interpolation']})" if "interpolation" in entry else ""
        return (f"resized to {sides[0]} x {sides[1]}" if len(sides) > 1 else f"shorter side resized to {size}") + how
    if name == "CenterCrop":
        return f"center crop {sides[0]} x {sides[-1]}"
    if name == "Normalize":
        mean, std = (", ".join(f"{value:g}" for value in entry[key]) for key in ("mean", "std"))
        is_usual = [list(entry["mean"]), list(entry["std"])] == [*_IMAGENET]
        return f"mean {mean}, std {std}{' (those of ImageNet)' if is_usual else ''}"
    arguments = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "name")
    return f"{name} {arguments}".strip()


def build_split_pipeline(data_cfg: Data, split: str) -> Pipeline:
    """Build the pipeline of the TRANSFORMS of a split ("TRAIN" or "TEST"), for the backend of the DATA block.

    Raises:
        ConfigError: as ``build_pipeline``; also if the backend lacks a transform.
    """
    on_device, key = data_cfg.AUGMENT_ON == "device", f"config.DATA.{split}.TRANSFORMS"
    return _with_backend(data_cfg, split_of(data_cfg, split).TRANSFORMS, key, on_device)


def _with_backend(data_cfg: Data, entries: Sequence[Mapping[str, Any]], key: str, on_device: bool) -> Pipeline:
    if data_cfg.IN_CHANNELS != 3:
        return build_channel_pipeline(entries, key, Decoder.of(data_cfg))
    if data_cfg.BACKEND == "pil":
        return build_pipeline(entries, key)
    try:
        # Imported here, because its libraries are optional.
        from vissl_zero.data.fast.device_pipeline import DevicePipeline
        from vissl_zero.data.fast.pipeline import FastPipeline, build_fast_pipeline
    except ModuleNotFoundError as error:
        fix = "Run pip install vissl-zero[fast], or write config.DATA.BACKEND=pil."
        raise ConfigError([Problem("config.DATA.BACKEND", "fast", f"needs {error.name}", fix)]) from error
    return build_fast_pipeline(entries, key, Decoder.of(data_cfg), DevicePipeline if on_device else FastPipeline)
