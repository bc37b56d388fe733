"""Absolute error of masked pixels: SimMIM (https://arxiv.org/abs/2111.09886, section 3.4)."""

from __future__ import annotations

from torch import Tensor

from vissl_zero.methods.gather import at_least_float32, weighted_mean


def simmim_loss(predictions: Tensor, images: Tensor, mask: Tensor) -> Tensor:
    """Mean absolute error over the masked pixels of all ranks.

    Args:
        predictions, images: (n, C, H, W) of this rank's images.
        mask: (n, h, w), True or 1 where a patch was hidden; h divides H and w divides W.
    Returns:
        0-d; the loop's mean over ranks is the mean over masked pixels, however they are spread. Collective.
    Cost: one all-reduce of two numbers.
    """
    errors = (at_least_float32(predictions) - images).abs().mean(dim=1)  # (n, H, W)
    rows, columns = errors.shape[1] // mask.shape[1], errors.shape[2] // mask.shape[2]
    pixels = mask.repeat_interleave(rows, dim=1).repeat_interleave(columns, dim=2)
    return weighted_mean(errors, pixels.to(errors.dtype), len(predictions))
