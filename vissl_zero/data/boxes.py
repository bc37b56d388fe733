"""The boxes of crops in their image.

Boxes are drawn with the sample's random numbers before the transforms run and draw the same numbers again. So no
transform has to return boxes, and they are the same for every backend. This is correct by the rules of
``resolve/boxes.py``: ImgPilToMultiCrop comes first, RandomHorizontalFlip second, and no other transform moves pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor

from vissl_zero.data.pipeline import build_pipeline


class CropBoxes:
    """The boxes of an image's crops.

    Args:
        crops: torchvision's transform for each crop.
        flip_probability: probability that a crop is mirrored; None: there is no RandomHorizontalFlip.
    """

    def __init__(
        self, crops: Sequence[torchvision.transforms.RandomResizedCrop], flip_probability: float | None = None
    ):
        self._crops, self._flip_probability = tuple(crops), flip_probability

    def draw(self, height: int, width: int) -> Tensor:
        """Draw the boxes that the transforms will draw with the same random numbers.

        Args:
            height, width: size of the image, in pixels.
        Returns:
            (V, 4) float32: top, left, bottom and right edge of each crop, in pixels of the image. A mirrored crop has
            left and right exchanged.
        """
        image = torch.empty(3, height, width, device="meta")  # torchvision reads its size only
        # All crops before all flips, because the transforms draw in this order.
        drawn = [crop.get_params(image, list(crop.scale), list(crop.ratio)) for crop in self._crops]
        boxes = torch.tensor([(top, left, top + down, left + across) for top, left, down, across in drawn])
        if self._flip_probability is not None:
            for row in boxes:
                if torch.rand(1) < self._flip_probability:
                    row.copy_(row[[0, 3, 2, 1]])
        return boxes.float()


def boxes_of(entries: Sequence[Mapping[str, Any]], key: str) -> CropBoxes | None:
    """Return the boxes' draws for a TRANSFORMS list, or None if its crops do not keep boxes.

    Args:
        entries: TRANSFORMS, in a form that ``build_pipeline`` accepts.
        key: configuration key of the list, for messages.
    """
    if not entries or not entries[0].get("keeps_boxes"):
        return None
    has_flip = len(entries) > 1 and entries[1]["name"] == "RandomHorizontalFlip"
    # torchvision's transforms for any backend, since the fast forms draw the same numbers.
    multi_crop, *flips = build_pipeline(entries[: 1 + has_flip], key).transforms
    return CropBoxes(multi_crop._crops, flips[0].p if flips else None)  # type: ignore[attr-defined]
