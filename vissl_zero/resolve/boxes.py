"""Rules for crops that keep their boxes (``keeps_boxes``): which transforms may be used with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.resolve.data_plan import splits
from vissl_zero.resolve.pairs import OF_IMAGES

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

MULTI_CROP, FLIP = "ImgPilToMultiCrop", "RandomHorizontalFlip"
_ALLOWED = (*OF_IMAGES, "ImgPilMultiCropRandomApply")


def keeps_boxes(cfg: RunConfig) -> bool:
    """Check whether the training crops keep their boxes."""
    return any(_keeps(entry) for entry in cfg.DATA.TRAIN.TRANSFORMS)


def boxes(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that crops are taken from whole training images, and that no later transform moves pixels."""
    problems: list[Problem] = []
    for split, options in splits(cfg).items():
        entries = [entry for entry in options.TRANSFORMS if isinstance(entry, Mapping)]
        if not any(map(_keeps, entries)):
            continue
        key = f"config.DATA.{split}.TRANSFORMS"
        if split != "TRAIN":
            must = "must not keep boxes, which only training looks at"
            problems.append(Problem(key, MULTI_CROP, must, "Leave out keeps_boxes."))
            continue
        # A box is in units of the image that the crop was taken from. After another transform that is no longer the
        # file's image.
        if not _keeps(entries[0]):
            must = "must be the first transform where it keeps boxes, which are those of the whole image"
            problems.append(
                Problem(key, MULTI_CROP, must, f"Move {MULTI_CROP} to the front, or leave out keeps_boxes.")
            )
            continue
        # Only a flip directly after the crops is applied to the boxes too.
        last = 2 if len(entries) > 1 and entries[1].get("name") == FLIP else 1
        for name in _names(entries[last:]):
            if name not in _ALLOWED:
                must = f"must not follow {MULTI_CROP} with keeps_boxes, whose boxes it would make wrong"
                fix = f"Leave it out. {FLIP} may come second; after it: {', '.join(_ALLOWED)}."
                problems.append(Problem(key, name, must, fix))
    return problems


def _keeps(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("name") == MULTI_CROP and bool(entry.get("keeps_boxes"))


def _names(entries: Sequence[Any]) -> list[str]:
    """Return the names of transforms, including the transforms nested in them."""
    names = []
    for entry in entries:
        if isinstance(entry, Mapping):
            names += [str(entry.get("name")), *_names(entry.get("transforms") or ())]
    return names


BOX_RULES = (boxes,)
