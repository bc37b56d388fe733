"""RandAugment (https://arxiv.org/abs/1909.13719) as VISSL and timm have it, or as torchvision has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchvision
from PIL import Image, ImageOps

from vissl_zero.registry import TRANSFORMS

# The order of VISSL's lists: which number drawn is which operation.
_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color"),
    *("Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
# Those that have a form whose severity grows with the magnitude.
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
# VISSL's one set of weights (rand_auto_aug.py); the others are never drawn.
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
    """timm's, which new versions of Pillow refuse at the greatest magnitude, 0 bits: black."""
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
    """VISSL's RandAugment where one of its keys is written, by timm's operations; else torchvision's.

    Args:
        magnitude: strength of each operation; VISSL's from 0 to 10, 10 by default.
        magnitude_std: deviation of a normal draw around it, 0 by default. VISSL's alone, like the next three.
        num_layers: operations for an image, 2 by default; each is applied with probability 0.5.
        increasing_severity: take the forms of operations whose severity grows with the magnitude.
        weight_choice: 0: operations are drawn by VISSL's weights, each once; null: evenly.
        torchvisions: keys of ``torchvision.transforms.RandAugment``.
    Raises:
        TypeError, ValueError: keys of both, or a wrong value.
    """
    own = (magnitude_std, num_layers, increasing_severity, weight_choice)
    if all(value is None for value in own):
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
