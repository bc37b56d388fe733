"""Segmentation: the class of every pixel, from a trunk's last maps.

Head and loss follow fully convolutional networks (https://arxiv.org/abs/1411.4038): logits at the resolution of the
maps, upsampled to the image by bilinear interpolation. ``fcn_head`` has the layers of mmsegmentation's FCNHead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32, weighted_mean
from vissl_zero.methods.method import Batch, GuessingMethod
from vissl_zero.methods.segmentation_keys import FCNHeadConfig, SegmentationLossConfig
from vissl_zero.registry import HEADS, LOSSES
from vissl_zero.resolve.pairs import IGNORED


@HEADS.register("fcn_head", config=FCNHeadConfig)
class FCNHead(nn.Module):
    """A 1x1 convolution; each width between the first and the last adds a 3x3 convolution with norm and ReLU before it.

    Args: the fields of ``FCNHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], use_bn: bool = True):
        super().__init__()
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(dims[:-1]):
            # Batch norm subtracts the mean, and a bias with it.
            layers.append(nn.Conv2d(width_in, width_out, 3, padding=1, bias=not use_bn))
            layers += [nn.BatchNorm2d(width_out)] if use_bn else []
            layers.append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*layers, nn.Conv2d(dims[-2], dims[-1], 1))

    def forward(self, features: Tensor, maps: list[Tensor]) -> Tensor:
        """Compute logits (n, C, h, w) of maps (n, D, h, w) of the single resolution."""
        (feature_map,) = maps
        logits: Tensor = self.layers(feature_map)
        return logits


def pixel_cross_entropy(logits: Tensor, masks: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the mean cross-entropy over the pixels of all ranks that are not ignored.

    Args:
        logits: (n, C, H, W) of this rank's images.
        masks: (n, H, W), the class of each pixel, or ``IGNORED``.
        weights: (C,) of each class; None: all equal.
    Returns:
        0-d; the loop's mean over ranks is the mean over all these pixels. Collective.
    Cost: one all-reduce of two numbers.
    """
    classes = masks.long()
    counts = classes != IGNORED
    # ``gather`` needs a valid index for ignored pixels too; their weight below is 0.
    known = torch.where(counts, classes, 0)
    # gather, because torch's cross-entropy of maps is not deterministic on CUDA.
    errors = -F.log_softmax(at_least_float32(logits), dim=1).gather(1, known[:, None]).squeeze(1)
    shares = counts.to(errors.dtype) if weights is None else counts * weights.to(errors.dtype)[known]
    return weighted_mean(errors, shares, len(logits))


def as_large_as(logits: Tensor, masks: Tensor) -> Tensor:
    """Interpolate logits (n, C, h, w) to the size of masks (n, H, W)."""
    return F.interpolate(at_least_float32(logits), size=masks.shape[1:], mode="bilinear")


@LOSSES.register("segmentation_loss", config=SegmentationLossConfig)
class Segmentation(GuessingMethod):
    """Segmentation: cross-entropy of the class of every pixel.

    Args: the fields of ``SegmentationLossConfig``.
    """

    class_weights: Tensor | None
    predicts_pixels = True
    share_name = "pixel_accuracy"

    def __init__(self, weight: Sequence[float] | None = None):
        super().__init__()
        self.register_buffer("class_weights", None if weight is None else torch.tensor(weight))

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over pixels that are not ignored; see ``pixel_cross_entropy``. Collective.

        Raises:
            ConfigError: the images have no masks, or there are several crops.
        """
        masks = masks_of(batch)
        logits = as_large_as(outputs[0], masks)
        self._note_guesses((masks != IGNORED).sum(), (logits.detach().argmax(dim=1) == masks).sum())
        return pixel_cross_entropy(logits, masks, self.class_weights)


def masks_of(batch: Batch) -> Tensor:
    """Return the masks of a micro-batch.

    Raises:
        ConfigError: the images have none.
    """
    if batch.masks is None:
        fix = "Write config.DATA.TRAIN.DATA_SOURCES=[segmentation_folder], with images/ and masks/ in the folder."
        must = "must be a source of images with masks for segmentation_loss"
        raise ConfigError([Problem("config.DATA.TRAIN.DATA_SOURCES", "", must, fix)])
    return batch.masks
