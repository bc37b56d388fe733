"""Regression of masked patches' pixels: MAE (https://arxiv.org/abs/2111.06377, section 3)."""

from __future__ import annotations

from torch import Tensor

from vissl_zero.methods.gather import at_least_float32, weighted_mean

_VARIANCE_EPS = 1e-6


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Pixels of each patch, (B, C, H, W) -> (B, P, patch_size^2 * C), patches row by row, channels innermost.

    Raises:
        ValueError: the patch size does not divide the image.
    """
    height, width = images.shape[2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"images of {height} x {width} pixels have no whole patches of {patch_size} pixels")
    patches = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)  # (B, C, h, w, p, p)
    return patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


def pixel_targets(images: Tensor, patch_size: int, normalize: bool = True) -> Tensor:
    """What a decoder predicts, (B, P, patch_size^2 * C); with ``normalize``, each patch has mean 0 and variance 1."""
    patches = patchify(at_least_float32(images), patch_size)
    if not normalize:
        return patches
    variances = patches.var(dim=2, keepdim=True)
    return (patches - patches.mean(dim=2, keepdim=True)) / (variances + _VARIANCE_EPS).sqrt()


def mae_loss(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared error of the masked patches, averaged over their elements, then over the masked patches of all ranks.

    Args:
        predictions, targets: (n, P, E) of this rank's images.
        mask: (n, P), True or 1 where a patch was hidden.
    Returns:
        0-d; the loop's mean over ranks is the mean over masked patches, however they are spread. Collective.
    Cost: one all-reduce of two numbers.
    """
    errors = (at_least_float32(predictions) - targets.detach()).square().mean(dim=2)
    return weighted_mean(errors, mask.to(errors.dtype), len(predictions))
