"""Fast forms of transforms, by the names of the originals: the same random numbers in the same order, on arrays.

``resolve/fast_forms.py`` lists them, with the arguments that each takes; all others are refused at the start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
import torchvision

from vissl_zero.data import transforms as originals
from vissl_zero.data.fast.picture import Cut, EncodedPicture, Picture

Image = Picture | EncodedPicture
Form = Callable[[Any], Any]


class CutBoxes:
    """Random resized crops, of one image: RandomResizedCrop, ImgPilToMultiCrop, copies that are cropped at once.

    Args:
        crops: torchvision's transform for each crop, whose boxes are drawn.
    """

    takes_files = True

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
        scale: least and largest share of its area.
        ratio: least and largest width over height.
    Returns:
        Top, left, height and width; after ten boxes that do not fit, the largest one in the middle.
    """
    height, width = size
    least, most = _logarithms(ratio)
    for _ in range(10):
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


def random_resized_crop(**arguments: Any) -> CutBoxes:
    """Crop once."""
    return CutBoxes([torchvision.transforms.RandomResizedCrop(**arguments)])


def multi_crop(**arguments: Any) -> CutBoxes:
    """Crop to several sizes."""
    return CutBoxes(originals.ImgPilToMultiCrop(**arguments)._crops)


class Replicate:
    """Copies of an image."""

    takes_files = True

    def __init__(self, **arguments: Any):
        self.num_times = originals.ImgReplicatePil(**arguments).num_times

    def __call__(self, image: Image) -> list[Picture]:
        return [image.opened().copy() for _ in range(self.num_times)]


class CropAndTiles:
    """PIRL's crop, and the tiles of another one."""

    takes_files = True

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

    takes_files = True

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
    """The middle of an image; black where it is smaller."""

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
    """Return a probability as torch compares it with a drawn tensor: in single precision."""
    return float(np.float32(p))


class Flip:
    """A mirrored image, with a probability."""

    def __init__(self, p: float = 0.5):
        self.p = single(p)

    def __call__(self, picture: Picture) -> None:
        if torch.rand(1).item() < self.p:
            picture.colors.mirror()


class ColorJitter:
    """Brightness, contrast, saturation and hue in random order; see ``color.py``."""

    def __init__(self, **arguments: Any):
        self._original = torchvision.transforms.ColorJitter(**arguments)

    def __call__(self, picture: Picture) -> None:
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

    def __call__(self, picture: Picture) -> None:
        if torch.rand(1).item() < self.p:
            picture.colors.gray()


class Apply:
    """Other forms, all or none."""

    def __init__(self, transforms: Sequence[Form], p: float = 0.5):
        self._transforms, self.p = tuple(transforms), single(p)

    def __call__(self, picture: Picture) -> None:
        if self.p >= torch.rand(1).item():
            for transform in self._transforms:
                transform(picture)


class ColorDistortion:
    """Jitter with probability 0.8, then gray with probability 0.2."""

    def __init__(self, **arguments: Any):
        apply, gray = originals.ImgPilColorDistortion(**arguments)._distort.transforms
        jitter = ColorJitter()
        jitter._original = apply.transforms[0]
        self._steps = (Apply([jitter], apply.p), Gray(gray.p))

    def __call__(self, picture: Picture) -> None:
        for step in self._steps:
            step(picture)


class ApplyToSome:
    """Other forms with a probability for each crop."""

    takes_all_crops = True

    def __init__(self, transforms: Sequence[Form], prob: Sequence[float]):
        self._original = originals.ImgPilMultiCropRandomApply((), prob)
        self._transforms = tuple(transforms)

    def __call__(self, crops: Sequence[Picture]) -> None:
        shares = self._original.prob
        if len(crops) != len(shares):
            raise ValueError(f"prob has {len(shares)} entries, and there are {len(crops)} crops")
        for crop, share in zip(crops, shares, strict=True):
            if random.random() < share:
                for transform in self._transforms:
                    transform(crop)


class Blur:
    """Gaussian blur of a random radius, with a probability; its kernel is what Pillow's three boxes make together."""

    def __init__(self, **arguments: Any):
        self._original = originals.ImgPilGaussianBlur(**arguments)

    def __call__(self, picture: Picture) -> None:
        original = self._original
        if random.random() < original.p:
            radius = random.uniform(original.radius_min, original.radius_max)
            kernel = three_boxes(round(radius * _RADII) / _RADII)
            picture.pixels = cv2.sepFilter2D(picture.pixels, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)


_RADII = 256  # kept kernels per pixel of radius


@lru_cache(1024)
def three_boxes(radius: float) -> np.ndarray:
    """Return the kernel of three box filters whose variances add up to ``radius`` squared.

    A box has whole weights up to a distance of l pixels and a part a of one beyond, as in Gwosdek et al.,
    https://doi.org/10.1007/978-3-642-24785-9_38, equations 7, 11 and 14.
    """
    variance = radius * radius / 3
    whole = int((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    box = np.ones(2 * whole + 3)
    box[[0, -1]] = part
    box /= box.sum()
    return np.convolve(np.convolve(box, box), box).astype(np.float32)


_ALL = np.arange(256)


def _solarized(picture: Picture, threshold: float) -> None:
    picture.pixels = cv2.LUT(picture.pixels, np.where(threshold > _ALL, _ALL, 255 - _ALL).astype(np.uint8))


class Solarize:
    """Values from a threshold up inverted, with a probability."""

    def __init__(self, threshold: float, p: float = 0.5):
        self.threshold, self.p = threshold, p

    def __call__(self, picture: Picture) -> None:
        if torch.rand(1).item() < self.p:
            _solarized(picture, self.threshold)


class RandomSolarize:
    """The same, from a threshold that is drawn."""

    def __init__(self, **arguments: Any):
        self.p = originals.ImgPilRandomSolarize(**arguments).p

    def __call__(self, picture: Picture) -> None:
        if random.random() < self.p:
            _solarized(picture, random.randint(0, 256))


class Photometric:
    """PIRL's: fewer bits, blurred or sharpened, solarized, contrast stretched."""

    _SMOOTH: ClassVar = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13

    def __init__(self, **arguments: Any):
        self.p = originals.ImgPilRandomPhotometric(**arguments).p

    def __call__(self, picture: Picture) -> None:
        if random.random() >= self.p:
            return
        bits = random.randint(4, 8)
        pixels = cv2.LUT(picture.pixels, (_ALL & ~(2 ** (8 - bits) - 1)).astype(np.uint8))
        smooth = pixels.copy()
        smooth[1:-1, 1:-1] = cv2.filter2D(pixels, -1, self._SMOOTH)[1:-1, 1:-1]  # Pillow leaves the border
        picture.pixels = _blended(smooth, pixels, random.uniform(0.1, 1.9))
        _solarized(picture, random.randint(0, 256))
        picture.pixels = cv2.LUT(picture.pixels, self._stretching(picture.pixels))

    @staticmethod
    def _stretching(pixels: np.ndarray) -> np.ndarray:
        """Build the table (256, 1, 3), uint8, that spreads each channel over 0 to 255."""
        tables = []
        for least, most in zip(pixels.min((0, 1)).tolist(), pixels.max((0, 1)).tolist(), strict=True):
            scale = 255 / (most - least) if most > least else 1.0
            tables.append((_ALL * scale - least * scale).astype(int).clip(0, 255) if most > least else _ALL)
        return np.stack(tables, -1).astype(np.uint8)[:, None]


def _blended(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """Mix two images as Pillow does, which drops the fraction."""
    mixed: np.ndarray = cv2.addWeighted(first, 1 - share, second, share, -0.5)
    return mixed


class Stroke:
    """Thicker or thinner bright strokes."""

    def __init__(self, **arguments: Any):
        self.strength = originals.ImgPilRandomStroke(**arguments).strength

    def __call__(self, picture: Picture) -> None:
        change = cv2.dilate if random.random() < 0.5 else cv2.erode
        changed = change(picture.pixels, np.ones((3, 3), np.uint8))
        picture.pixels = _blended(picture.pixels, changed, random.uniform(0.0, self.strength))


class Affine:
    """Turned, moved, scaled and sheared at random, bilinear; black where nothing is."""

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
        moved[(x < 0) | (x >= width) | (y < 0) | (y >= height)] = 0
        picture.pixels = moved


FORMS: dict[str, Callable[..., Form]] = {
    "RandomResizedCrop": random_resized_crop,
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
