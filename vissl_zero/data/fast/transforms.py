"""Fast forms of transforms, under the names of the originals: the same draws in the same order, on arrays.

``resolve/fast_forms.py`` lists the forms with their arguments; other transforms are refused before the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import cv2
import numpy as np
import torch
import torchvision

from vissl_zero.data import transforms as originals
from vissl_zero.data.fast.noted import NotedPicture
from vissl_zero.data.fast.picture import Cut, EncodedPicture, Picture

Image = Picture | EncodedPicture
AnyPicture = Picture | NotedPicture  # changes are applied at once, or on the device
Form = Callable[[Any], Any]


def moves_pixels(form: Form) -> bool:
    """Check whether a form crops, resizes or rotates images. Other forms change colors or mirror."""
    return getattr(form, "moves_pixels", False)


class CutBoxes:
    """Random resized crops of one image: RandomResizedCrop, ImgPilToMultiCrop, and copies that are cropped next.

    Args:
        crops: torchvision's transform of each crop, with its distribution of boxes.
    """

    moves_pixels = takes_files = True

    def __init__(self, crops: Sequence[torchvision.transforms.RandomResizedCrop]):
        self.crops = tuple(crops)
        self._kinds = [
            ((crop.size[0], crop.size[1]), crop.interpolation.value, tuple(crop.scale), tuple(crop.ratio))
            for crop in crops
        ]

    def __call__(self, image: Image) -> list[Picture]:
        return image.cut(
            [Cut(*draw_box(image.size, scale, ratio), size, mode) for size, mode, scale, ratio in self._kinds]
        )


def draw_box(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draw the box that torchvision's ``RandomResizedCrop.get_params`` draws, in half the time.

    Args:
        size: height and width of the image.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
    Returns:
        Top, left, height and width; if ten draws do not fit, the largest box in the center.
    """
    height, width = size
    least, most = _logarithms(ratio)
    for _ in range(10):
        # The same torch calls as torchvision's, in its order: the generator's state is the same after each crop.
        area = height * width * torch.empty(1).uniform_(*scale).item()
        aspect = torch.empty(1).uniform_(least, most).exp_().item()
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            top = torch.randint(0, height - down + 1, (1,)).item()
            return int(top), int(torch.randint(0, width - across + 1, (1,)).item()), down, across
    across = min(width, round(height * max(ratio)))
    down = min(height, round(width / min(ratio)))
    return (height - down) // 2, (width - across) // 2, down, across


@cache
def _logarithms(ratio: tuple[float, float]) -> tuple[float, float]:
    least, most = torch.log(torch.tensor(ratio)).tolist()
    return least, most


def _random_resized_crop(**arguments: Any) -> CutBoxes:
    """Crop once."""
    return CutBoxes([torchvision.transforms.RandomResizedCrop(**arguments)])


def multi_crop(**arguments: Any) -> CutBoxes:
    """Crop to several sizes."""
    return CutBoxes(originals.ImgPilToMultiCrop(**arguments)._crops)


class Replicate:
    """Copies of an image."""

    moves_pixels = takes_files = True

    def __init__(self, **arguments: Any):
        self.num_times = originals.ImgReplicatePil(**arguments).num_times

    def __call__(self, image: Image) -> list[Picture]:
        return [image.opened().copy() for _ in range(self.num_times)]


class CropAndTiles:
    """PIRL's crop, and the tiles of a second crop."""

    moves_pixels = takes_files = True

    def __init__(self, **arguments: Any):
        original = originals.ImgPilToPatchesAndImage(**arguments)
        self._crops, self._tiles = CutBoxes([original._whole, original._cut]), original._tiles

    def __call__(self, image: Image) -> list[Picture]:
        whole, other = self._crops(image)
        boxes = self._tiles.boxes(other.size[0])
        random.shuffle(boxes)
        tiles = [other.pixels[top:bottom, left:right] for left, top, right, bottom in boxes]
        return [whole, *(Picture(np.ascontiguousarray(tile)) for tile in tiles)]


class Resize:
    """The whole image, resized: the shorter side to a number, or to height and width."""

    moves_pixels = takes_files = True

    def __init__(self, **arguments: Any):
        original = torchvision.transforms.Resize(**arguments)
        self._size, self._mode = original.size, original.interpolation.value

    def __call__(self, image: Image) -> Picture:
        height, width = image.size
        sides = [self._size] if isinstance(self._size, int) else list(self._size)
        if len(sides) == 1:  # torchvision's rounding: down
            short = min(height, width)
            size = (int(sides[0] * height / short), int(sides[0] * width / short))
        else:
            size = (sides[0], sides[1])
        (resized,) = image.cut([Cut(0, 0, height, width, size, self._mode)])
        return resized


class CenterCrop:
    """The center of an image, padded with black if the image is smaller."""

    moves_pixels = True

    def __init__(self, **arguments: Any):
        self._size = tuple(torchvision.transforms.CenterCrop(**arguments).size)

    def __call__(self, picture: Picture) -> None:
        pixels = picture.pixels
        missing = [max(0, wanted - side) for wanted, side in zip(self._size, picture.size, strict=True)]
        if any(missing):
            down, across = missing
            edges = (down // 2, (down + 1) // 2, across // 2, (across + 1) // 2)
            pixels = cv2.copyMakeBorder(pixels, *edges, cv2.BORDER_CONSTANT, value=(0, 0, 0))
        top, left = (round((side - wanted) / 2.0) for side, wanted in zip(pixels.shape[:2], self._size, strict=True))
        picture.pixels = np.ascontiguousarray(pixels[top : top + self._size[0], left : left + self._size[1]])


def single(p: float) -> float:
    """Round a probability to float32."""
    # torch compares a drawn float32 tensor with p in float32; Python would compare in float64.
    return float(np.float32(p))


class Flip:
    """A mirrored image, with a probability."""

    def __init__(self, p: float = 0.5):
        self.p = single(p)

    def __call__(self, picture: AnyPicture) -> None:
        if torch.rand(1).item() < self.p:
            picture.colors.mirror()


class ColorJitter:
    """Brightness, contrast, saturation and hue in random order; see ``color.py``."""

    def __init__(self, **arguments: Any):
        self._original = torchvision.transforms.ColorJitter(**arguments)

    def __call__(self, picture: AnyPicture) -> None:
        original = self._original
        ranges = original.brightness, original.contrast, original.saturation, original.hue
        order, *factors = original.get_params(*ranges)
        colors = picture.colors
        changes = (colors.brighten, colors.stretch, colors.saturate, colors.turn_hue)
        for index in order.tolist():
            if factors[index] is not None:
                changes[index](factors[index])


class Gray:
    """The gray of an image, with a probability."""

    def __init__(self, p: float = 0.1):
        self.p = single(p)

    def __call__(self, picture: AnyPicture) -> None:
        if torch.rand(1).item() < self.p:
            picture.colors.gray()


class Apply:
    """Other forms, all or none."""

    def __init__(self, transforms: Sequence[Form], p: float = 0.5):
        self._transforms, self.p = tuple(transforms), single(p)
        self.moves_pixels = any(map(moves_pixels, transforms))

    def __call__(self, picture: AnyPicture) -> None:
        if self.p >= torch.rand(1).item():  # torchvision's comparison, unlike the others'
            for transform in self._transforms:
                transform(picture)


class ColorDistortion:
    """Jitter with probability 0.8, then gray with probability 0.2."""

    def __init__(self, **arguments: Any):
        apply, gray = originals.ImgPilColorDistortion(**arguments)._distort.transforms
        jitter = ColorJitter()
        jitter._original = apply.transforms[0]
        self._steps = (Apply([jitter], apply.p), Gray(gray.p))

    def __call__(self, picture: AnyPicture) -> None:
        for step in self._steps:
            step(picture)


class ApplyToSome:
    """Other forms with a probability for each crop."""

    takes_all_crops = True

    def __init__(self, transforms: Sequence[Form], prob: Sequence[float]):
        self._original = originals.ImgPilMultiCropRandomApply((), prob)
        self._transforms = tuple(transforms)
        self.moves_pixels = any(map(moves_pixels, transforms))

    def __call__(self, crops: Sequence[AnyPicture]) -> None:
        shares = self._original.prob
        if len(crops) != len(shares):
            raise ValueError(f"prob has {len(shares)} entries, and there are {len(crops)} crops")
        for crop, share in zip(crops, shares, strict=True):
            if random.random() < share:
                for transform in self._transforms:
                    transform(crop)


class Blur:
    """Gaussian blur of a random radius, with a probability, by the joint kernel of Pillow's three box filters."""

    def __init__(self, **arguments: Any):
        self._original = originals.ImgPilGaussianBlur(**arguments)

    def __call__(self, picture: AnyPicture) -> None:
        original = self._original
        if random.random() < original.p:
            radius = random.uniform(original.radius_min, original.radius_max)
            # Rounded, so that kernels are found in the cache. The difference is below what 8 bits show.
            picture.blur(_three_boxes(round(radius * _RADII) / _RADII))


_RADII = 256  # cached kernels per pixel of radius


@lru_cache(1024)
def _three_boxes(radius: float) -> np.ndarray:
    """Return the kernel of three box filters whose variances sum to ``radius`` squared, (2 r + 1,) float32."""
    # Extended box filters of Gwosdek et al. (https://doi.org/10.1007/978-3-642-24785-9_38, equations 7, 11 and 14):
    # weight 1 up to a distance of ``whole`` pixels, and ``part`` for one pixel more.
    variance = radius * radius / 3
    whole = int((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    box = np.ones(2 * whole + 3)
    box[[0, -1]] = part
    box /= box.sum()
    return np.convolve(np.convolve(box, box), box).astype(np.float32)


class Solarize:
    """Values from a threshold up inverted, with a probability."""

    def __init__(self, threshold: float, p: float = 0.5):
        self.threshold, self.p = threshold, p

    def __call__(self, picture: AnyPicture) -> None:
        if torch.rand(1).item() < self.p:
            picture.solarize(self.threshold)


class RandomSolarize:
    """Values from a random threshold up inverted, with a probability."""

    def __init__(self, **arguments: Any):
        self.p = originals.ImgPilRandomSolarize(**arguments).p

    def __call__(self, picture: AnyPicture) -> None:
        if random.random() < self.p:
            picture.solarize(random.randint(0, 256))


class Photometric:
    """PIRL's photometric distortion; see ``ImgPilRandomPhotometric``."""

    def __init__(self, **arguments: Any):
        self.p = originals.ImgPilRandomPhotometric(**arguments).p

    def __call__(self, picture: AnyPicture) -> None:
        if random.random() >= self.p:
            return
        picture.posterize(random.randint(4, 8))
        picture.sharpen(random.uniform(0.1, 1.9))
        picture.solarize(random.randint(0, 256))
        picture.spread()


class Stroke:
    """Thicker or thinner bright strokes."""

    def __init__(self, **arguments: Any):
        self.strength = originals.ImgPilRandomStroke(**arguments).strength

    def __call__(self, picture: AnyPicture) -> None:
        is_thicker = random.random() < 0.5
        picture.stroke(is_thicker, random.uniform(0.0, self.strength))


class Affine:
    """A random rotation, translation, scaling and shear, bilinear; black outside of the image."""

    moves_pixels = True

    def __init__(self, **arguments: Any):
        self._original = torchvision.transforms.RandomAffine(**arguments)

    def __call__(self, picture: Picture) -> None:
        original, (height, width) = self._original, picture.size
        ranges = original.degrees, original.translate, original.scale, original.shear
        drawn = original.get_params(*ranges, [width, height])
        inverse = torchvision.transforms.functional._get_inverse_affine_matrix([width * 0.5, height * 0.5], *drawn)
        matrix = np.array(inverse).reshape(2, 3)
        half = matrix.copy()
        half[:, 2] += matrix[:, :2].sum(1) / 2 - 0.5  # Pillow counts from a pixel's corner, OpenCV from its center
        how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        moved = cv2.warpAffine(picture.pixels, half, (width, height), flags=how, borderMode=cv2.BORDER_REPLICATE)
        across, down = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5
        x, y = (row[0] * across + row[1] * down + row[2] for row in matrix)
        # Pillow fills pixels whose center is outside; OpenCV's constant border would also blend into pixels inside.
        moved[(x < 0) | (x >= width) | (y < 0) | (y >= height)] = 0
        picture.pixels = moved


FORMS: dict[str, Callable[..., Form]] = {
    "RandomResizedCrop": _random_resized_crop,
    "ImgPilToMultiCrop": multi_crop,
    "ImgReplicatePil": Replicate,
    "ImgPilToPatchesAndImage": CropAndTiles,
    "Resize": Resize,
    "CenterCrop": CenterCrop,
    "RandomHorizontalFlip": Flip,
    "ColorJitter": ColorJitter,
    "RandomGrayscale": Gray,
    "RandomApply": Apply,
    "ImgPilColorDistortion": ColorDistortion,
    "ImgPilMultiCropRandomApply": ApplyToSome,
    "ImgPilGaussianBlur": Blur,
    "RandomSolarize": Solarize,
    "ImgPilRandomSolarize": RandomSolarize,
    "ImgPilRandomPhotometric": Photometric,
    "ImgPilRandomStroke": Stroke,
    "RandomAffine": Affine,
}
