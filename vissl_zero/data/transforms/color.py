"""SimCLR's colour distortion and blur, BYOL's solarization; images of one channel in colour."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torchvision
from PIL import Image, ImageFilter, ImageOps

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
        return image.filter(ImageFilter.GaussianBlur(random.uniform(self.radius_min, self.radius_max)))


@TRANSFORMS.register("ImgPilColorDistortion")
class ImgPilColorDistortion:
    """Colour jitter with probability 0.8, then grey with probability 0.2: https://arxiv.org/abs/2002.05709, appendix A.

    Args:
        strength: 1.0 jitters brightness, contrast and saturation by 0.8 and hue by 0.2; other values scale all four.
    """

    def __init__(self, strength: float = 1.0):
        jitter = torchvision.transforms.ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
        self._distort = torchvision.transforms.Compose(
            [torchvision.transforms.RandomApply([jitter], p=0.8), torchvision.transforms.RandomGrayscale(p=0.2)],
        )

    def __call__(self, image: Image.Image) -> Image.Image:
        distorted: Image.Image = self._distort(image)
        return distorted


@TRANSFORMS.register("ImgPilRandomSolarize")
class ImgPilRandomSolarize:
    """Inverts, with a probability, all values from a threshold up that is drawn from 0 to 256, as VISSL has it.

    Args:
        p: probability.
    """

    def __init__(self, p: float = 0.66):
        if not 0 <= p <= 1:
            raise ValueError("p must be from 0 to 1")
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image, random.randint(0, 256)) if random.random() < self.p else image


@TRANSFORMS.register("MNISTImgPil2RGB")
class MNISTImgPil2RGB:
    """An RGB image, if asked for on a black canvas of another size.

    Args:
        size: height and width of the canvas, or one number for both; empty: the image's own.
        box: left and upper edge of the image on it, in pixels.
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
