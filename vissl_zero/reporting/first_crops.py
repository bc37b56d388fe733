"""The crops that the model saw first, made again as they were: augmentations depend on seed, epoch and sample alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vissl_zero.data.batch import Batch
from vissl_zero.data.source import Source
from vissl_zero.engine.hook import Run
from vissl_zero.errors import DataError
from vissl_zero.reporting.report_content import CropSample

_NUM_SAMPLES = 8


def first_crops(run: Run) -> list[CropSample]:
    """Some samples of this rank's first batch; none if the images cannot be read any more. Cost: loads one step."""
    try:
        batch = next(iter(run.loader.epoch(0)))[0]
    except DataError:  # a report is no reason to fail a run that has ended well
        return []
    return crop_samples(batch, run.loader.source, run.plan.config["DATA"]["TRAIN"]["TRANSFORMS"])


def crop_samples(batch: Batch, source: Source, transforms: Sequence[Mapping[str, Any]]) -> list[CropSample]:
    """The first samples of a batch as pictures.

    Args:
        batch: as the loader gives it, on the CPU.
        source: where the samples come from.
        transforms: TRANSFORMS, for the mean and standard deviation to undo.
    """
    normalize: Mapping[str, Any] = next((entry for entry in transforms if entry["name"] == "Normalize"), {})
    mean, std = normalize.get("mean", [0.0] * 3), normalize.get("std", [1.0] * 3)
    samples = []
    for sample in range(min(_NUM_SAMPLES, batch.num_local)):
        crops = [
            denormalised(images[crop * batch.num_local + sample], mean, std)
            for images, num_crops in zip(batch.images, batch.num_crops, strict=True)
            for crop in range(num_crops)
        ]
        crops.sort(key=lambda crop: -crop.shape[0])
        samples.append(CropSample(original(source, int(batch.sample_ids[sample])), crops))
    return samples


def original(source: Source, index: int) -> np.ndarray | None:
    """An image of a source, (H, W, 3) uint8, at most 256 pixels long; None if it cannot be read."""
    try:
        image = source.image(index)
    except (DataError, OSError):
        return None
    image.thumbnail((256, 256))
    return np.asarray(image.convert("RGB"))


def denormalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """A picture, (h, w, 3) uint8, from a normalised tensor (3, h, w) and what it was normalised with, per channel."""
    picture = image.double().numpy().transpose(1, 2, 0) * np.array(std) + np.array(mean)
    return np.rint(picture.clip(0, 1) * 255).astype(np.uint8)
