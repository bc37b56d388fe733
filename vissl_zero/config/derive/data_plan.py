"""Which images: the sources that DATA_PATHS implies, and the transforms at DATA.IMG_SIZE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vissl_zero.config.blocks.data import Data
from vissl_zero.config.components.trunks import patch_side
from vissl_zero.config.run_config import RunConfig

BUILT_IN = ("digits", "synthetic")
_MULTI_CROP, _PATCHES_AND_IMAGE = ("size_crops",), ("crop_size_image", "crop_size_patches")
_SIZED = ("RandomResizedCrop", "CenterCrop", "RandomCrop", "Resize", "FiveCrop", "TenCrop")


def use_own_images(data: Data, chosen: Collection[str]) -> list[str]:
    """Make DATA_PATHS mean what it says in a recipe for the digits, in place; returns sentences to say once.

    DATA_PATHS implies disk_folder. A TEST split of digits is left out where TRAIN has images of the user's: part of
    those is evaluated on then.

    Args:
        data: the block as composed.
        chosen: keys under ``config:`` that the command line sets. A source that is named there stays.
    """
    for name in ("TRAIN", "TEST"):
        split = getattr(data, name)
        if split.DATA_PATHS and split.DATA_SOURCES in ([], ["digits"]) and f"DATA.{name}.DATA_SOURCES" not in chosen:
            split.DATA_SOURCES = ["disk_folder"]
    is_own = data.TRAIN.DATA_SOURCES and data.TRAIN.DATA_SOURCES[0] not in BUILT_IN
    if is_own and data.TEST.DATA_SOURCES == ["digits"] and "DATA.TEST.DATA_SOURCES" not in chosen:
        data.TEST.DATA_SOURCES = []
        fix = "config.DATA.TEST.DATA_PATHS=<folder> names others."
        return [f"config.DATA.TEST: part of the training images is evaluated on, not the recipe's digits. {fix}"]
    return []


def with_image_size(cfg: RunConfig) -> RunConfig:
    """``cfg``, or a copy whose transforms make crops of DATA.IMG_SIZE: all of their sizes times one factor.

    A vision transformer's smaller crops become whole patches: 224 and 96 pixels at IMG_SIZE=64 are 64 and 32.
    """
    size, train, test = cfg.DATA.IMG_SIZE, cfg.DATA.TRAIN, cfg.DATA.TEST
    largest = largest_crop(train.TRANSFORMS)
    if size is None or not largest or not 1 <= size <= 65536:
        return cfg
    factor, side = size / largest, patch_side(cfg.MODEL.TRUNK)
    side = side if size % side == 0 else 1  # else a rule refuses the size
    data = replace(
        cfg.DATA,
        TRAIN=replace(train, TRANSFORMS=_scaled(train.TRANSFORMS, factor, side)),
        TEST=replace(test, TRANSFORMS=_scaled(test.TRANSFORMS, factor, side)),
    )
    return replace(cfg, DATA=data)


def largest_crop(transforms: Sequence[Any]) -> int | None:
    """Longest side in pixels that the last sized transform makes; None where nothing sets a size."""
    return max(crop_sides(transforms), default=None)


def crop_sides(transforms: Sequence[Any]) -> list[int]:
    """Sides in pixels that the last sized transform makes; none where nothing sets a size."""
    entry, keys = _last_sized(transforms)
    values = [side for key in keys for value in _as_list(entry[key]) for side in _as_list(value)]
    return [side for side in values if isinstance(side, int) and side > 0]


def _last_sized(transforms: Sequence[Any]) -> tuple[Any, Sequence[str]]:
    """The transform that sets the size of what the trunk sees, and the keys that do."""
    sized = ((entry, [key for key in _size_keys(entry) if entry.get(key)]) for entry in reversed(transforms))
    return next(((entry, keys) for entry, keys in sized if keys), ({}, ()))


def _size_keys(entry: Any) -> Sequence[str]:
    if not isinstance(entry, Mapping):
        return ()
    if entry.get("name") in _SIZED:
        return ("size",)
    return next((keys for keys in (_MULTI_CROP, _PATCHES_AND_IMAGE) if keys[0] in entry), ())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _scaled(transforms: Sequence[Any], factor: float, side: int) -> list[Any]:
    last, scaled = _last_sized(transforms)[0], []
    for entry in transforms:
        whole = side if entry is last else 1  # what is cut afterwards need not be whole patches
        sizes = {key: _times(entry[key], factor, whole) for key in _size_keys(entry) if key in entry}
        scaled.append({**entry, **sizes} if sizes else entry)
    return scaled


def _times(value: Any, factor: float, whole: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_times(side, factor, whole) for side in value]
    return max(1, round(value * factor / whole)) * whole if isinstance(value, int) else value
