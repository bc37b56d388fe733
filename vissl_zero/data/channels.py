"""Images of any number of channels, of 8 or 16 bits or floating point, as tensors (DATA.IN_CHANNELS)."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor

from vissl_zero.data import transforms as originals
from vissl_zero.data.decode import FORMATS, BrokenImageError, Decoder, named
from vissl_zero.data.pipeline import Pipeline, build_pipeline
from vissl_zero.data.source import Source, array_of, encoded_image

_NUMPY = b"\x93NUMPY"
# Pillow modes whose arrays are bits, palette indices or premultiplied colors -> mode with plain values.
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}


def read_channels(source: Source, index: int, decoder: Decoder) -> Tensor:
    """Read an image as float32 (C, H, W); 255, or 65,535 of 16 bits, becomes 1. Raises BrokenImageError."""
    name, array = source.name(index), array_of(source)
    data = encoded_image(source, index) if array is None else array(index)
    return to_channels(data, name, decoder)


def to_channels(data: bytes | np.ndarray | Image.Image, name: str, decoder: Decoder) -> Tensor:
    """Convert an image to float32 (C, H, W).

    Args:
        data: content of a file, an array, or an image that a source made; every channel gets the gray of the last.
        name: name of the image, for errors.
        decoder: decoder with the number of channels.
    Raises:
        BrokenImageError: the image cannot be decoded, or has another number of channels.
    """
    if isinstance(data, Image.Image):
        gray = np.asarray(data.convert("L"))
        return _scaled(np.repeat(gray[None], decoder.channels, axis=0), name)
    with named(name):
        array = data if isinstance(data, np.ndarray) else _decoded(data, name, decoder)
        return _scaled(_channels_first(array, name, decoder.channels), name)


def _decoded(data: bytes, name: str, decoder: Decoder) -> np.ndarray:
    """Decode a ``.npy`` file or an image; the pages of a multipage TIFF become channels."""
    if data.startswith(_NUMPY):
        array: np.ndarray = np.load(io.BytesIO(data))
        return array
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        decoder.check(*image.size, data, name)
        pages = []
        for page in range(getattr(image, "n_frames", 1)) if image.format == "TIFF" else (0,):
            image.seek(page)
            upright = ImageOps.exif_transpose(image) if decoder.applies_exif else image
            pages.append(np.asarray(upright.convert(_MODES.get(upright.mode, upright.mode))))
    return pages[0] if len(pages) == 1 else np.concatenate([page.reshape(*page.shape[:2], -1) for page in pages], 2)


def _channels_first(array: np.ndarray, name: str, count: int) -> np.ndarray:
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3 and 0 not in array.shape:
        # Channels first wins where both fit, as in an image of as many rows as channels.
        if array.shape[0] == count:
            return array
        if array.shape[2] == count:
            return array.transpose(2, 0, 1)
    shape = " x ".join(map(str, array.shape))
    raise BrokenImageError(name, f"its shape is {shape}, and config.DATA.IN_CHANNELS asks for {count} channels")


def _scaled(array: np.ndarray, name: str) -> Tensor:
    # Files of other machines may have the other byte order, with the same values.
    most = {np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65_535.0}.get(array.dtype.newbyteorder("="))
    if most is None and array.dtype.kind != "f":
        raise BrokenImageError(name, f"its values are {array.dtype}; uint8, uint16 and floating point are read")
    values = array.astype(np.float32)
    if most is None and not np.isfinite(values).all():
        raise BrokenImageError(name, "it has values that are not finite")
    return torch.from_numpy(values if most is None else values / np.float32(most))


class ChannelPipeline(Pipeline):
    """Transforms of tensors: torchvision's, and ours in a form for tensors that draws the same numbers."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], decoder: Decoder):
        super().__init__([_of_tensors(transform) for transform in transforms])
        self._decoder = decoder

    def read(self, source: Source, index: int) -> Tensor:
        return read_channels(source, index, self._decoder)

    def size(self, read: Tensor) -> tuple[int, int]:
        _, height, width = read.shape
        return height, width

    def open(self, image: bytes | Image.Image, name: str, decoder: Decoder) -> Tensor:
        return to_channels(image, name, self._decoder)

    def begun(self, image: Any) -> Any:
        return to_channels(image, "image", self._decoder) if isinstance(image, Image.Image) else image


def build_channel_pipeline(entries: Sequence[Mapping[str, Any]], key: str, decoder: Decoder) -> ChannelPipeline:
    """Build the pipeline of TRANSFORMS with names that ``resolve/channels.py`` allows; see ``build_pipeline``."""
    return ChannelPipeline(build_pipeline(entries, key).transforms, decoder)


def _of_tensors(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if isinstance(transform, torchvision.transforms.ToTensor):
        return _Same()
    if isinstance(transform, originals.ImgReplicatePil):
        return _Copies(transform.num_times)
    if isinstance(transform, originals.ImgPilGaussianBlur):
        return _Blur(transform)
    if isinstance(transform, (torchvision.transforms.RandomApply, originals.ImgPilMultiCropRandomApply)):
        transform.transforms = tuple(_of_tensors(inner) for inner in transform.transforms)
    return transform


class _Same:
    """The identity in place of ToTensor: images are tensors already."""

    def __call__(self, image: Tensor) -> Tensor:
        return image


class _Copies:
    def __init__(self, num_times: int):
        self.num_times = num_times

    def __call__(self, image: Tensor) -> list[Tensor]:
        return [image.clone() for _ in range(self.num_times)]


class _Blur:
    """Gaussian blur of tensors, with the draws of ImgPilGaussianBlur."""

    def __init__(self, original: originals.ImgPilGaussianBlur):
        self._original = original

    def __call__(self, image: Tensor) -> Tensor:
        original = self._original
        if random.random() >= original.p:
            return image
        # After the draw of p, as in the original: both draw the same numbers for one seed.
        radius = random.uniform(original.radius_min, original.radius_max)
        reach = min(max(1, round(3 * radius)), min(image.shape[1:]) - 1)  # reflection needs a reach below the side
        side = 2 * reach + 1
        blurred: Tensor = torchvision.transforms.functional.gaussian_blur(image, [side, side], [radius, radius])
        return blurred
