"""SimCLR's blur."""

from __future__ import annotations

import random

from PIL import Image, ImageFilter

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
