"""Transforms of an image with its mask: the same draws for both, and nearest interpolation for the mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vissl_zero.config.blocks.data import Data
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.pipeline import Pipeline, build_pipeline
from vissl_zero.data.source import Source, masks_of
from vissl_zero.data.sources.segmentation import different_sizes
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.pairs import GEOMETRIC


class _PairPipeline(Pipeline):
    """A sequence of transforms of images with masks; each returns one image.

    Images are the same as without masks.

    Args:
        pipeline: pipeline of images alone.
        of_masks: transform of masks for each of the pipeline's transforms; None if it does not change masks.
    """

    def __init__(self, pipeline: Pipeline, of_masks: Sequence[Callable[[Any], Any] | None]):
        super().__init__(pipeline.transforms)
        self._of_masks = tuple(of_masks)

    def read(self, source: Source, index: int) -> tuple[Image.Image, Image.Image]:
        """Read an image and its mask. Raises BrokenImageError, also if their sizes differ."""
        read_mask = masks_of(source)
        assert read_mask is not None, "the source has masks"
        image, mask = source.image(index), read_mask(index)
        if image.size != mask.size:
            raise BrokenImageError(source.name(index), different_sizes(image.size, mask.size))
        return image, mask

    def sample(self, read: tuple[Image.Image, Image.Image]) -> tuple[list[Any], Tensor | None]:
        """Return the crop of an image and its mask (H, W), transformed with the same draws."""
        image, mask = read
        # Image transforms run first and alone, so that they draw as without masks. Each mask transform then starts from
        # the random state of its image transform.
        states, crops = [], [image]
        for transform in self.transforms:
            states.append(torch.get_rng_state())
            crops = self.step(transform, crops)
        mask = _shifted(mask, 1)
        for state, moved in zip(states, self._of_masks, strict=True):
            if moved is not None:
                torch.set_rng_state(state)
                mask = moved(mask)
        return self.finished(crops), torch.from_numpy(np.asarray(_shifted(mask, -1)).copy())


def _shifted(mask: Image.Image, by: int) -> Image.Image:
    """Add ``by`` to all classes, modulo 256."""
    # Shifted by 1, the ignored class 255 is 0, the value with which transforms pad.
    return mask.point([(value + by) % 256 for value in range(256)])


def with_masks(pipeline: Pipeline, source: Source, data_cfg: Data, entries: Sequence[Mapping[str, Any]]) -> Pipeline:
    """Return the pipeline for the images of ``source``: ``pipeline`` itself, or one of pairs if images have masks.

    Args:
        pipeline: pipeline of images alone.
        source: source of the images.
        data_cfg: DATA block with the backend.
        entries: TRANSFORMS of the pipeline.
    Raises:
        ConfigError: the backend does not support masks.
    """
    if masks_of(source) is None:
        return pipeline
    if data_cfg.BACKEND != "pil":
        must = "must be pil for images with masks"
        raise ConfigError([Problem("config.DATA.BACKEND", data_cfg.BACKEND, must, "Write config.DATA.BACKEND=pil.")])
    return _PairPipeline(pipeline, [_of_masks(entry) for entry in entries])


def _of_masks(entry: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Build the mask transform for an image transform: nearest interpolation, padding of 0; None if not geometric."""
    if entry["name"] not in GEOMETRIC:
        return None
    key = "config.DATA.TRAIN.TRANSFORMS"
    (plain,) = build_pipeline([entry], key).transforms
    # Images may be filled with a color. Masks are filled with 0, which means ignored here.
    of_masks = {word: value for word, value in entry.items() if word != "fill"}
    # Interpolation between two classes would give a third.
    if "interpolation" in inspect.signature(type(plain)).parameters:
        of_masks["interpolation"] = "nearest"
    (transform,) = build_pipeline([of_masks], key).transforms
    return transform
