from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.reporting.panels import crop_samples

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


class Flat:
    """Images of one gray each; image 9 is broken."""

    class_names = ()

    def __len__(self) -> int:
        return 16

    def image(self, index: int) -> Image.Image:
        if index == 9:
            raise BrokenImageError("9.png", "it is cut short")
        return Image.new("RGB", (600, 300), (index, index, index))

    def label(self, index: int) -> None:
        return None

    def name(self, index: int) -> str:
        return f"{index}.png"


def normalized(gray: int, side: int) -> torch.Tensor:
    image = torch.full((3, side, side), gray / 255)
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def batch() -> ImageBatch:
    """Two samples (sources 4 and 9), crops of 8 px first, then 2 of 12: gray 10 * crop + sample."""
    small = torch.stack([normalized(10 + sample, 8) for sample in range(2)])
    large = torch.stack([normalized(10 * crop + sample, 12) for crop in (2, 3) for sample in range(2)])
    return ImageBatch([small, large], [1, 2], None, torch.tensor([4, 9]), 2)


def test_crops_are_shown_as_they_were_before_normalization() -> None:
    transforms = [{"name": "ToTensor"}, {"name": "Normalize", "mean": MEAN, "std": STD}]
    first, second = crop_samples(batch(), Flat(), transforms)
    assert [crop.shape for crop in first.crops] == [(12, 12, 3), (12, 12, 3), (8, 8, 3)]
    assert [np.unique(crop).tolist() for crop in first.crops] == [[20], [30], [10]]
    assert [np.unique(crop).tolist() for crop in second.crops] == [[21], [31], [11]]


def test_originals_are_small_and_may_be_unreadable() -> None:
    first, second = crop_samples(batch(), Flat(), [])
    assert first.original is not None and first.original.shape == (128, 256, 3)
    assert np.unique(first.original).tolist() == [4]
    assert second.original is None


@pytest.mark.parametrize("num_samples", [1, 20])
def test_a_few_samples_are_enough(num_samples: int) -> None:
    images = [torch.zeros(num_samples, 3, 4, 4)]
    many = ImageBatch(images, [1], None, torch.zeros(num_samples, dtype=torch.int64), num_samples)
    assert len(crop_samples(many, Flat(), [])) == min(8, num_samples)


def test_images_of_other_channels_are_shown_by_their_first() -> None:
    image = torch.stack([torch.full((4, 4), value) for value in (0.2, 0.4, 0.6, 0.8)])
    of_four = ImageBatch([image[None]], [1], None, torch.zeros(1, dtype=torch.int64), 1)
    (sample,) = crop_samples(of_four, Flat(), [])
    assert sample.crops[0].shape == (4, 4, 3) and np.unique(sample.crops[0]).tolist() == [51]
