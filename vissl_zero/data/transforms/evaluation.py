"""How images are shown to a model that is being evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vissl_zero.data.transforms.pipeline import Pipeline, build_pipeline

_SIZED = ("RandomResizedCrop", "CenterCrop", "RandomCrop", "Resize")


def build_eval_pipeline(data_cfg: Mapping[str, Any]) -> Pipeline:
    """TEST's TRANSFORMS, or, where it has none, Resize, CenterCrop, ToTensor and Normalize as TRAIN's imply.

    The size is that of TRAIN's largest crops (no resizing where TRAIN has none), Normalize is TRAIN's own.
    """
    if data_cfg["TEST"]["TRANSFORMS"]:
        return build_pipeline(data_cfg["TEST"]["TRANSFORMS"], "config.DATA.TEST.TRANSFORMS")
    train = data_cfg["TRAIN"]["TRANSFORMS"]
    return build_pipeline(derive_eval_transforms(train), "config.DATA.TRAIN.TRANSFORMS")


def derive_eval_transforms(train: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The list ``build_eval_pipeline`` uses without TEST.TRANSFORMS; see there."""
    size = _largest_crop(train)
    sized: list[Mapping[str, Any]] = (
        [{"name": "Resize", "size": max(size)}, {"name": "CenterCrop", "size": size}] if size else []
    )
    normalize = [entry for entry in train if entry["name"] == "Normalize"]
    return [*sized, {"name": "ToTensor"}, *normalize]


def _largest_crop(train: Sequence[Mapping[str, Any]]) -> list[int]:
    """Height and width of TRAIN's largest crop, or an empty list if nothing in TRAIN sets a size."""
    for entry in reversed(train):  # the last transform that sets a size decides
        if entry["name"] == "ImgPilToMultiCrop":
            return [max(entry["size_crops"])] * 2
        if entry["name"] in _SIZED:
            size = entry["size"]
            return [size, size] if isinstance(size, int) else list(size) * (2 // len(size))
    return []
