"""Places of crops in their image: the boxes that its transforms draw.

They are drawn once more, with the sample's random numbers, before the transforms run: so they are the same for every
backend, whose draws are the same, and no transform has to carry them. ``resolve/boxes.py`` has the rules that make
this right: ImgPilToMultiCrop comes first, RandomHorizontalFlip second, and nothing else moves pixels.
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
        flip_probability: probability that a crop is mirrored; None: none is, and nothing is drawn for it.
    """

    def __init__(
        self, crops: Sequence[torchvision.transforms.RandomResizedCrop], flip_probability: float | None = None
    ):
        self._crops, self._flip_probability = tuple(crops), flip_probability

    def draw(self, height: int, width: int) -> Tensor:
        """Draw the boxes that the transforms will draw with the same random numbers.

        Args:
            height, width: of the image, in pixels.
        Returns:
            (V, 4) float32: top, left, bottom and right edge of what each crop shows, in pixels of the image. A mirrored
            crop has left and right exchanged.
        """
        image = torch.empty(3, height, width, device="meta")  # of which torchvision asks the size
        drawn = [crop.get_params(image, list(crop.scale), list(crop.ratio)) for crop in self._crops]
        boxes = torch.tensor([(top, left, top + down, left + across) for top, left, down, across in drawn])
        if self._flip_probability is not None:
            for row in boxes:
                if torch.rand(1) < self._flip_probability:
                    row.copy_(row[[0, 3, 2, 1]])
        return boxes.float()


def boxes_of(entries: Sequence[Mapping[str, Any]], key: str) -> CropBoxes | None:
    """Return what draws the boxes of a TRANSFORMS list, or None if its crops do not keep them.

    Args:
        entries: the list, which ``build_pipeline`` accepts.
        key: where it stands, for messages.
    """
    if not entries or not entries[0].get("keeps_boxes"):
        return None
    has_flip = len(entries) > 1 and entries[1]["name"] == "RandomHorizontalFlip"
    multi_crop, *flips = build_pipeline(entries[: 1 + has_flip], key).transforms
    return CropBoxes(multi_crop._crops, flips[0].p if flips else None)  # type: ignore[attr-defined]
