"""The fast pipeline up to the last crop; later changes are drawn and recorded, and applied to batches on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from vissl_zero.data.changes import Change, Changes
from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.noted import NotedPicture
from vissl_zero.data.fast.picture import EncodedPicture, Picture
from vissl_zero.data.fast.pipeline import FastPipeline
from vissl_zero.data.fast.transforms import Form, moves_pixels
from vissl_zero.data.pipeline import Pipeline


class HandOver:
    """The end of a worker's changes: later changes of the crop are recorded, not applied."""

    def __call__(self, picture: Picture | EncodedPicture) -> NotedPicture:
        return NotedPicture(picture.opened().pixels)


class DevicePipeline(FastPipeline):
    """A FastPipeline, with the same draws, whose batches have 8-bit pixels and ``changes``."""

    def __init__(self, forms: Sequence[Form], end: Pipeline, decoder: Decoder):
        # Changes of color depend on no other pixel's position, so all after the last geometric form can wait.
        last = max((index + 1 for index, form in enumerate(forms) if moves_pixels(form)), default=0)
        super().__init__([*forms[:last], HandOver(), *forms[last:]], end, decoder)

    def step(self, transform: Any, crops: list[Any]) -> list[Any]:
        made = super().step(transform, crops)
        for crop in made:
            if isinstance(crop, NotedPicture):
                crop.noted.append([])  # changes of the next transform
        return made

    def finished(self, crops: list[Any]) -> list[Any]:
        for crop in crops:
            crop.settle()
        return crops

    def write(self, crop: Any, row: np.ndarray) -> list[list[Change]]:
        """Write pixels into a row (3, H, W) uint8."""
        # OpenCV writes into the planes that it is given, which are those of the batch.
        cv2.split(crop.pixels, list(row))
        return crop.noted

    def changes(self, notes: Sequence[list[list[Change]]]) -> Changes:
        return Changes.of(notes, torch.from_numpy(self._values))

    def __call__(self, image: Any) -> list[Tensor]:
        return [self.changes([crop.noted])(self.stacked([crop]))[0] for crop in self.crops(image)]
