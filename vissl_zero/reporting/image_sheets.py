"""The sheets of pictures: the crops that the model saw first, and nearest neighbours before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from vissl_zero.data.batch import Batch
from vissl_zero.data.source import Source
from vissl_zero.engine.hook import Run
from vissl_zero.errors import DataError
from vissl_zero.reporting.report_content import CropSample, NeighbourRow
from vissl_zero.reporting.report_page import BLUE, SOFT, VERMILLION

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


_GAP = 6  # pixels between pictures
_LABEL = 22  # height of the line above them
_LARGEST_TILE = 126
_CROP_COLUMNS = 2


def crops_height(samples: Sequence[CropSample], width: float) -> float:
    """Pixels that ``draw_crops`` needs."""
    rows = math.ceil(len(samples) / _CROP_COLUMNS)
    return _LABEL + rows * (_crop_tile(samples, width) + _GAP)


def draw_crops(axes: Axes, samples: Sequence[CropSample], width: float, label: str = "") -> None:
    """Each sample's image, then its crops, as large beside each other as the model got them.

    Args:
        label: what stands above the crops; empty: how many of which size the model saw.
    """
    tile = _crop_tile(samples, width)
    column_width = (width - 8 * _GAP) / _CROP_COLUMNS + 8 * _GAP
    largest = max(max(crop.shape[:2]) for sample in samples for crop in sample.crops)
    for column in range(min(_CROP_COLUMNS, len(samples))):
        left = column * column_width
        axes.text(left, 12, "image", color=SOFT, fontsize=9.5)
        axes.text(left + tile + 3 * _GAP, 12, label or _crop_label(samples[0]), color=SOFT, fontsize=9.5)
    for index, sample in enumerate(samples):
        left = (index % _CROP_COLUMNS) * column_width
        top = _LABEL + (index // _CROP_COLUMNS) * (tile + _GAP)
        if sample.original is not None:
            _show(axes, sample.original, left, top, tile)
        left += tile + 3 * _GAP
        for crop in sample.crops:
            side = tile * max(crop.shape[:2]) / largest
            _show(axes, crop, left, top + (tile - side) / 2, side)
            left += side + _GAP


def _crop_tile(samples: Sequence[CropSample], width: float) -> float:
    largest = max(max(crop.shape[:2]) for sample in samples for crop in sample.crops)
    in_tiles = 1 + max(sum(max(crop.shape[:2]) / largest for crop in sample.crops) for sample in samples)
    most_crops = max(len(sample.crops) for sample in samples)
    room = (width - 8 * _GAP) / _CROP_COLUMNS - (most_crops + 3) * _GAP
    return min(_LARGEST_TILE, room / in_tiles)


def _crop_label(sample: CropSample) -> str:
    """``"what the model saw: 2 crops of 32 x 32, 4 of 16 x 16 pixels"``."""
    sizes = [f"{crop.shape[1]} x {crop.shape[0]}" for crop in sample.crops]
    counted = [f"{sizes.count(size)} of {size}" for size in dict.fromkeys(sizes)]
    return f"what the model saw: {', '.join(counted)} pixels"


def neighbours_height(rows: Sequence[NeighbourRow], width: float) -> float:
    """Pixels that ``draw_neighbours`` needs."""
    return _LABEL + len(rows) * (_neighbour_tile(rows, width) + _GAP)


def draw_neighbours(axes: Axes, rows: Sequence[NeighbourRow], width: float) -> None:
    """A test image per row, then its nearest training images before and after training."""
    tile = _neighbour_tile(rows, width)
    num = len(rows[0].before)
    block = num * (tile + _GAP)
    lefts = {"test image": 0.0, "nearest before training": tile + 5 * _GAP}
    lefts["nearest after training"] = lefts["nearest before training"] + block + 4 * _GAP
    for name, left in lefts.items():
        axes.text(left, 12, name, color=SOFT, fontsize=9.5)
    _, before_left, after_left = lefts.values()
    for index, row in enumerate(rows):
        top = _LABEL + index * (tile + _GAP)
        _show(axes, row.query, 0, top, tile)
        for left, pictures, matches in (
            (before_left, row.before, row.before_matches),
            (after_left, row.after, row.after_matches),
        ):
            for place, picture in enumerate(pictures):
                color = None if matches is None else BLUE if matches[place] else VERMILLION
                _show(axes, picture, left + place * (tile + _GAP), top, tile, color)


def _neighbour_tile(rows: Sequence[NeighbourRow], width: float) -> float:
    num = len(rows[0].before)
    return min(_LARGEST_TILE, (width - 9 * _GAP) / (1 + 2 * num) - _GAP)


def _show(axes: Axes, picture: np.ndarray, left: float, top: float, side: float, border: str | None = None) -> None:
    """A picture with its longer side ``side`` pixels long, centred in its square; a coloured border if one is given."""
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    left += (side - width * scale) / 2
    top += (side - height * scale) / 2
    box = (left, left + width * scale, top + height * scale, top)
    limits = axes.get_xlim(), axes.get_ylim()  # imshow would fit the axes to the picture
    axes.imshow(picture, extent=box, aspect="auto")
    axes.set(xlim=limits[0], ylim=limits[1])
    if border is not None:
        axes.add_patch(
            Rectangle((left, top), width * scale, height * scale, fill=False, edgecolor=border, linewidth=2.5)
        )
