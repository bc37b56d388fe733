"""Several crops of an image: SwAV's multi-crop, copies, and what is done to some of the crops alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

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


@TRANSFORMS.register("ImgReplicatePil")
class ImgReplicatePil:
    """Copies of an image. Later transforms act on each copy.

    Args:
        num_times: copies.
    """

    def __init__(self, num_times: int = 2):
        if type(num_times) is not int or num_times < 1:
            raise ValueError("num_times must be a whole number, at least 1")
        self.num_times = num_times

    def __call__(self, image: Image.Image) -> list[Image.Image]:
        return [image.copy() for _ in range(self.num_times)]


@TRANSFORMS.register("ImgPilMultiCropRandomApply")
class ImgPilMultiCropRandomApply:
    """Transforms with a probability for each crop, as BYOL and DINO have it: https://arxiv.org/abs/2006.07733.

    Args:
        transforms: applied one after another, all or none of them.
        prob: for each crop, in the order in which crops are made.
    """

    takes_all_crops = True

    def __init__(self, transforms: Sequence[Callable[[Image.Image], Image.Image]], prob: Sequence[float]):
        if not all(0 <= share <= 1 for share in prob):
            raise ValueError("prob must list numbers from 0 to 1, one for each crop")
        self.transforms = tuple(transforms)
        self.prob = tuple(prob)

    def __call__(self, crops: Sequence[Image.Image]) -> list[Image.Image]:
        if len(crops) != len(self.prob):
            raise ValueError(f"prob has {len(self.prob)} entries, and there are {len(crops)} crops")
        return [
            self._all(crop) if random.random() < share else crop for crop, share in zip(crops, self.prob, strict=True)
        ]

    def _all(self, crop: Image.Image) -> Image.Image:
        for transform in self.transforms:
            crop = transform(crop)
        return crop
