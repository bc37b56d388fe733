"""SwAV's multi-crop."""

from __future__ import annotations

from collections.abc import Sequence

import torchvision
from PIL import Image

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import TRANSFORMS


@TRANSFORMS.register("ImgPilToMultiCrop")
class ImgPilToMultiCrop:
    """Random resized crops of several sizes: https://arxiv.org/abs/2006.09882. Later transforms act on each crop.

    Args:
        total_num_crops: crops per image, the sum of ``num_crops``.
        num_crops: crops of each size.
        size_crops: side of each size, in pixels.
        crop_scales: smallest and largest share of the image's area that a crop of each size shows.
    """

    def __init__(
        self,
        total_num_crops: int,
        num_crops: Sequence[int],
        size_crops: Sequence[int],
        crop_scales: Sequence[Sequence[float]],
    ):
        if not len(num_crops) == len(size_crops) == len(crop_scales) or sum(num_crops) != total_num_crops:
            got = f"total_num_crops {total_num_crops}, num_crops {list(num_crops)}, size_crops {list(size_crops)}"
            raise ConfigError(
                [
                    Problem(
                        "config.DATA.TRAIN.TRANSFORMS.ImgPilToMultiCrop",
                        got,
                        "needs num_crops, size_crops and crop_scales of one length, and total_num_crops their sum",
                        f"With these num_crops, total_num_crops is {sum(num_crops)}.",
                    )
                ]
            )
        self.size_crops = tuple(size_crops)
        self._crops = [
            torchvision.transforms.RandomResizedCrop(size, scale=tuple(scale))
            for count, size, scale in zip(num_crops, size_crops, crop_scales, strict=True)
            for _ in range(count)
        ]

    def __call__(self, image: Image.Image) -> list[Image.Image]:
        return [crop(image) for crop in self._crops]
