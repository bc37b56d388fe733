"""Several crops of an image: SwAV's multi-crop, copies, tiles, and what is done to some of the crops alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torchvision
from PIL import Image
from torch import Tensor

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


@TRANSFORMS.register("ImgPatchesFromTensor")
class ImgPatchesFromTensor:
    """Tiles of an image: one at a random place of each cell of a grid, the cells column by column, as in VISSL.

    Neither an edge that goes on in the next tile nor the tile's place tells the order (arXiv 1603.09246, section 3.3).

    Args:
        num_patches: tiles, a square number.
        patch_jitter: by how much a tile's side is smaller than its cell's, in pixels; at least 1.
    """

    def __init__(self, num_patches: int = 9, patch_jitter: int = 21):
        self.side = math.isqrt(max(num_patches, 0))
        if self.side**2 != num_patches or num_patches < 1:
            raise ValueError("num_patches must be a square number")
        if patch_jitter < 1:
            raise ValueError("patch_jitter must be at least 1")
        self.patch_jitter = patch_jitter

    def __call__(self, image: Tensor) -> list[Tensor]:
        return [image[:, top:bottom, left:right].clone() for left, top, right, bottom in self.boxes(image.shape[1])]

    def boxes(self, height: int) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of each tile of a square image."""
        cell = height // self.side
        size = cell - self.patch_jitter
        if size < 1:
            raise ValueError(f"cells of {cell} pixels have no room for tiles; lower patch_jitter or crop larger images")
        corners = [
            (column * cell + random.randrange(self.patch_jitter), row * cell + random.randrange(self.patch_jitter))
            for column in range(self.side)
            for row in range(self.side)
        ]
        return [(left, top, left + size, top + size) for left, top in corners]


@TRANSFORMS.register("ImgPilToPatchesAndImage")
class ImgPilToPatchesAndImage:
    """A random resized crop, and the tiles of another one in random order, as PIRL has them (arXiv 1912.01991).

    Later transforms act on the crop and on each tile.

    Args:
        crop_scale_image: smallest and largest share of the image's area in the crop.
        crop_size_image: its side in pixels.
        crop_scale_patches, crop_size_patches: the same of the crop that is cut. A tile is 21 pixels less than its cell.
        num_patches: tiles, a square number.
        permute_patches: only true, as in VISSL, which does not read it.
    """

    def __init__(
        self,
        crop_scale_image: Sequence[float] = (0.08, 1.0),
        crop_size_image: int = 224,
        crop_scale_patches: Sequence[float] = (0.6, 1.0),
        crop_size_patches: int = 255,
        permute_patches: bool = True,
        num_patches: int = 9,
    ):
        if not permute_patches:
            raise ValueError("permute_patches must be true")
        self._whole = torchvision.transforms.RandomResizedCrop(crop_size_image, scale=tuple(crop_scale_image))
        self._cut = torchvision.transforms.RandomResizedCrop(crop_size_patches, scale=tuple(crop_scale_patches))
        self._tiles = ImgPatchesFromTensor(num_patches)

    def __call__(self, image: Image.Image) -> list[Image.Image]:
        whole, other = self._whole(image), self._cut(image)
        boxes = self._tiles.boxes(other.height)
        random.shuffle(boxes)
        return [whole, *(other.crop(box) for box in boxes)]


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
