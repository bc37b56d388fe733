"""Transforms that torchvision does not have: colors, and several crops of an image.

Colors: SimCLR's distortion and blur, BYOL's solarization, RandAugment (https://arxiv.org/abs/1909.13719, VISSL's and
timm's or torchvision's), gray to RGB. Crops: SwAV's multi-crop, copies, tiles, and transforms of some crops only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode

from vissl_zero.registry import TRANSFORMS


@TRANSFORMS.register("ImgPilGaussianBlur")
class ImgPilGaussianBlur:
    """Gaussian blur of a random radius, with a probability.

    Args:
        p: probability that a crop is blurred.
        radius_min: smallest standard deviation, in pixels.
        radius_max: largest.
    """

    def __init__(self, p: float = 0.5, radius_min: float = 0.1, radius_max: float = 2.0):
        self.p = p
        self.radius_min = radius_min
        self.radius_max = radius_max

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.p:
            return image
        # A radius for each image from SwAV's and SimCLR's range. Pillow approximates the Gaussian by three box filters.
        return image.filter(ImageFilter.GaussianBlur(random.uniform(self.radius_min, self.radius_max)))


@TRANSFORMS.register("ImgPilRandomStroke")
class ImgPilRandomStroke:
    """Thicker or thinner bright strokes: a random blend with the 3 x 3 maximum or minimum filter of the image.

    For scans of handwriting, where pens and writers differ. Torchvision has no such transform.

    Args:
        strength: largest share of the filtered image in the blend, 0 to 1.
    """

    def __init__(self, strength: float = 0.5):
        self.strength = strength

    def __call__(self, image: Image.Image) -> Image.Image:
        extreme = ImageFilter.MaxFilter(3) if random.random() < 0.5 else ImageFilter.MinFilter(3)
        return Image.blend(image, image.filter(extreme), random.uniform(0.0, self.strength))


@TRANSFORMS.register("ImgPilColorDistortion")
class ImgPilColorDistortion:
    """Color jitter with probability 0.8, then gray with probability 0.2: https://arxiv.org/abs/2002.05709, appendix A.

    Args:
        strength: factor of the other four.
        brightness, contrast, saturation, hue: ranges of ``ColorJitter``.
    """

    def __init__(
        self,
        strength: float = 1.0,
        brightness: float = 0.8,
        contrast: float = 0.8,
        saturation: float = 0.8,
        hue: float = 0.2,
    ):
        parts = (strength * part for part in (brightness, contrast, saturation, hue))
        jitter = torchvision.transforms.ColorJitter(*parts)
        self._distort = torchvision.transforms.Compose(
            [torchvision.transforms.RandomApply([jitter], p=0.8), torchvision.transforms.RandomGrayscale(p=0.2)],
        )

    def __call__(self, image: Image.Image) -> Image.Image:
        distorted: Image.Image = self._distort(image)
        return distorted


@TRANSFORMS.register("ImgPilRandomSolarize")
class ImgPilRandomSolarize:
    """Inverts, with a probability, all values from a random threshold (0 to 256) up, as in VISSL.

    Args:
        p: probability.
    """

    def __init__(self, p: float = 0.66):
        if not 0 <= p <= 1:
            raise ValueError("p must be from 0 to 1")
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image, random.randint(0, 256)) if random.random() < self.p else image


@TRANSFORMS.register("ImgPilRandomPhotometric")
class ImgPilRandomPhotometric:
    """PIRL's photometric distortion, with a probability: posterize, blur or sharpen, solarize, stretch the contrast.

    https://arxiv.org/abs/1912.01991. Bits are drawn from 4 to 8, sharpness from 0.1 to 1.9, a threshold from 0 to 256.

    Args:
        p: probability of the four together.
    """

    def __init__(self, p: float = 0.66):
        if not 0 <= p <= 1:
            raise ValueError("p must be from 0 to 1")
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.p:
            return image
        # The order is VISSL's (PIRL): each step sees the result of the one before.
        image = ImageOps.posterize(image, random.randint(4, 8))
        image = ImageEnhance.Sharpness(image).enhance(random.uniform(0.1, 1.9))
        return ImageOps.autocontrast(ImageOps.solarize(image, random.randint(0, 256)))


@TRANSFORMS.register("MNISTImgPil2RGB")
class MNISTImgPil2RGB:
    """Conversion to RGB, optionally on a black canvas of another size.

    Args:
        size: height and width of the canvas, or one number for both; empty: the image's size.
        box: left and upper edge of the image on the canvas, in pixels.
    """

    def __init__(self, size: int | Sequence[int] = (), box: Sequence[int] = (0, 0)):
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.box = tuple(box)
        if len(self.size) not in (0, 2) or len(self.box) != 2:
            raise ValueError("size must be a number or two, box two numbers")

    def __call__(self, image: Image.Image) -> Image.Image:
        canvas = Image.new("RGB", self.size or image.size)  # type: ignore[arg-type]
        canvas.paste(image, self.box if self.size else (0, 0))  # type: ignore[arg-type]
        return canvas


@TRANSFORMS.register("ImgPilToRawTensor")
class ImgPilToRawTensor:
    """A tensor with values from 0 to 255, not divided by 255."""

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(image, dtype=np.float32).transpose(2, 0, 1))


# sRGB to XYZ, rows divided by the white point D65, and CIE's constants: https://en.wikipedia.org/wiki/CIELAB_color_space
_TO_XYZ = np.array([[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]])
_WHITE = np.array([0.950456, 1.0, 1.088754])
_LINEAR_BELOW = 0.008856


@TRANSFORMS.register("ImgPil2LabTensor")
class ImgPil2LabTensor:
    """A Lab tensor: lightness from -50 to 50, a and b from -128 to 127, rounded to OpenCV's 8-bit values.

    Args:
        indices: must be empty; VISSL does not use them either.
    """

    def __init__(self, indices: Sequence[int] = ()):
        if indices:
            raise ValueError("indices must be empty")

    def __call__(self, image: Image.Image) -> Tensor:
        values = np.asarray(image, dtype=np.float64) / 255.0
        # The inverse of sRGB's transfer function: https://en.wikipedia.org/wiki/SRGB
        linear = np.where(values > 0.04045, ((values + 0.055) / 1.055) ** 2.4, values / 12.92)
        xyz = linear @ (_TO_XYZ / _WHITE[:, None]).T
        roots = np.where(xyz > _LINEAR_BELOW, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        # CIE's linear segment for dark colors, where the cube root would be too steep.
        lightness = np.where(xyz[..., 1] > _LINEAR_BELOW, 116 * roots[..., 1] - 16, 903.3 * xyz[..., 1])
        x, y, z = np.moveaxis(roots, -1, 0)
        eight_bits = np.stack([lightness * 255 / 100, 500 * (x - y) + 128, 200 * (y - z) + 128]).round().clip(0, 255)
        scaled = np.stack([eight_bits[0] * (100 / 255) - 50, eight_bits[1] - 128, eight_bits[2] - 128])
        return torch.from_numpy(scaled.astype(np.float32))


# In the order of VISSL's lists, so that a drawn index selects the same operation.
_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color"),
    *("Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
# Operations with a variant whose severity grows with the magnitude.
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
# VISSL's only set of weights (rand_auto_aug.py); operations with weight 0 are never drawn.
_WEIGHTS = {
    "Rotate": 0.3,
    "ShearX": 0.2,
    "ShearY": 0.2,
    "TranslateXRel": 0.1,
    "TranslateYRel": 0.1,
    **dict.fromkeys(("Color", "Sharpness", "AutoContrast"), 0.025),
    **dict.fromkeys(("Solarize", "SolarizeAdd", "Contrast", "Brightness", "Equalize"), 0.005),
    **dict.fromkeys(("Posterize", "Invert"), 0.0),
}
_FILL = (128, 128, 128)


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Posterize as timm does."""
    # timm's largest magnitude keeps 0 bits, a black image, which new versions of Pillow refuse.
    if bits_to_keep < 1:
        return image.point([0] * 256 * len(image.getbands()))
    return ImageOps.posterize(image, min(bits_to_keep, 8))


@TRANSFORMS.register("RandAugment")
def rand_augment(
    magnitude: int | None = None,
    magnitude_std: float | None = None,
    num_layers: int | None = None,
    increasing_severity: bool | None = None,
    weight_choice: int | None = None,
    **torchvisions: Any,
) -> Callable[[Image.Image], Image.Image]:
    """Build VISSL's RandAugment, of timm's operations, if one of its keys is set; else torchvision's.

    Args:
        magnitude: strength of each operation; VISSL's from 0 to 10, 10 by default.
        magnitude_std: standard deviation of the magnitude, 0 by default. VISSL's only, like the next three.
        num_layers: operations per image, 2 by default; each is applied with probability 0.5.
        increasing_severity: use the variants of operations whose severity grows with the magnitude.
        weight_choice: 0: draw operations by VISSL's weights, without replacement; null: with equal weights.
        torchvisions: keys of ``torchvision.transforms.RandAugment``.
    Raises:
        TypeError, ValueError: keys of both are set, or a value is wrong.
    """
    timms = (magnitude_std, num_layers, increasing_severity, weight_choice)
    if all(value is None for value in timms):
        keys = torchvisions if magnitude is None else {**torchvisions, "magnitude": magnitude}
        made: Callable[[Image.Image], Image.Image] = torchvision.transforms.RandAugment(**keys)
        return made
    if torchvisions:
        raise TypeError(f"{', '.join(torchvisions)} cannot go with VISSL's keys")
    if weight_choice not in (None, 0):
        raise ValueError(f"weight_choice must be 0 or null, not {weight_choice}")
    from timm.data.auto_augment import RandAugment, posterize, rand_augment_ops

    names = [f"{name}Increasing" if increasing_severity and name in _GROWING else name for name in _OPERATIONS]
    settings = {"translate_const": 250, "img_mean": _FILL, "magnitude_std": magnitude_std or 0}
    operations = rand_augment_ops(10 if magnitude is None else magnitude, hparams=settings, transforms=names)
    for operation in operations:
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    weights = None if weight_choice is None else [_WEIGHTS[name] for name in _OPERATIONS]
    chosen: Callable[[Image.Image], Image.Image] = RandAugment(operations, num_layers or 2, weights)
    return chosen


_INTERPOLATIONS = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


@TRANSFORMS.register("ImgPilToMultiCrop")
class ImgPilToMultiCrop:
    """Random resized crops of several sizes: https://arxiv.org/abs/2006.09882. Later transforms act on each crop.

    Args:
        total_num_crops: crops per image, the sum of ``num_crops``.
        num_crops: crops of each size.
        size_crops: side of each size, in pixels.
        crop_scales: smallest and largest share of the image's area that a crop of each size shows.
        interpolation: bilinear, or bicubic as in BYOL, DINO, MAE, Barlow Twins and VICReg.
        keeps_boxes: add the box of each crop to the batch (``CropBoxes``), for VICRegL.
    """

    def __init__(
        self,
        total_num_crops: int,
        num_crops: Sequence[int],
        size_crops: Sequence[int],
        crop_scales: Sequence[Sequence[float]],
        interpolation: str | InterpolationMode = "bilinear",
        keeps_boxes: bool = False,
    ):
        if type(keeps_boxes) is not bool:
            raise ValueError(f"keeps_boxes must be true or false, not {keeps_boxes}")
        if interpolation not in {*_INTERPOLATIONS, *(mode.value for mode in _INTERPOLATIONS)}:
            raise ValueError(f"interpolation must be bilinear or bicubic, not {interpolation}")
        if not len(num_crops) == len(size_crops) == len(crop_scales) or sum(num_crops) != total_num_crops:
            must = "needs num_crops, size_crops and crop_scales of one length, and total_num_crops their sum"
            raise ValueError(f"{must}; with these num_crops, total_num_crops is {sum(num_crops)}")
        self.size_crops = tuple(size_crops)
        self._crops = [
            torchvision.transforms.RandomResizedCrop(
                size, scale=tuple(scale), interpolation=InterpolationMode(interpolation)
            )
            for count, size, scale in zip(num_crops, size_crops, crop_scales, strict=True)
            for _ in range(count)
        ]

    def __call__(self, image: Image.Image) -> list[Image.Image]:
        return [crop(image) for crop in self._crops]


@TRANSFORMS.register("ImgReplicatePil")
class ImgReplicatePil:
    """Copies of an image. Later transforms act on each copy.

    Args:
        num_times: number of copies.
    """

    def __init__(self, num_times: int = 2):
        if type(num_times) is not int or num_times < 1:
            raise ValueError("num_times must be a whole number, at least 1")
        self.num_times = num_times

    def __call__(self, image: Image.Image) -> list[Image.Image]:
        return [image.copy() for _ in range(self.num_times)]


@TRANSFORMS.register("ImgPatchesFromTensor")
class ImgPatchesFromTensor:
    """Tiles of an image: one at a random position in each cell of a grid, in the order of columns, as in VISSL.

    Args:
        num_patches: tiles, a square number.
        patch_jitter: difference between the sides of a cell and of its tile, in pixels; at least 1.
    """

    def __init__(self, num_patches: int = 9, patch_jitter: int = 21):
        self.side = math.isqrt(max(num_patches, 0))
        if self.side**2 != num_patches or num_patches < 1:
            raise ValueError("num_patches must be a square number")
        if patch_jitter < 1:
            raise ValueError("patch_jitter must be at least 1")
        self.patch_jitter = patch_jitter

    def __call__(self, image: Tensor) -> list[Tensor]:
        height, width = image.shape[1:]
        boxes = self.boxes(height)
        if height != width:
            raise ValueError("tiles need a square image; crop it to a square first")
        return [image[:, top:bottom, left:right].clone() for left, top, right, bottom in boxes]

    def boxes(self, height: int) -> list[tuple[int, int, int, int]]:
        """Return left, top, right and bottom of each tile of a square image, given its side in pixels."""
        cell = height // self.side
        # Smaller than the cell: edges that continue in the next tile would reveal the order (arXiv 1603.09246, 3.3).
        size = cell - self.patch_jitter
        if size < 1:
            raise ValueError(f"cells of {cell} pixels have no room for tiles; lower patch_jitter or crop larger images")
        # The tile moves inside its cell, so that gaps between tiles differ and cannot be matched.
        corners = [
            (column * cell + random.randrange(self.patch_jitter), row * cell + random.randrange(self.patch_jitter))
            for column in range(self.side)
            for row in range(self.side)
        ]
        return [(left, top, left + size, top + size) for left, top in corners]


@TRANSFORMS.register("ImgPilToPatchesAndImage")
class ImgPilToPatchesAndImage:
    """A random resized crop, and the tiles of a second crop in random order, as in PIRL (arXiv 1912.01991).

    Later transforms act on the crop and on each tile.

    Args:
        crop_scale_image: smallest and largest share of the image's area in the crop.
        crop_size_image: side of the crop, in pixels.
        crop_scale_patches, crop_size_patches: the same for the crop that is cut into tiles. A tile's side is 21 pixels
            less than its cell's.
        num_patches: tiles, a square number.
        permute_patches: must be true; VISSL ignores it.
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
    """Transforms with a separate probability for each crop, as in BYOL and DINO: https://arxiv.org/abs/2006.07733.

    Args:
        transforms: applied in order, all or none.
        prob: probability for each crop, in the order in which crops are made.
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
