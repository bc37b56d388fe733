"""MAE: its loss, and the method as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.embedding import EmbeddingMethod, output_of
from vissl_zero.methods.gather import at_least_float32, weighted_mean
from vissl_zero.methods.mae.keys import MAELossConfig
from vissl_zero.methods.masks import random_order
from vissl_zero.methods.method import Batch
from vissl_zero.models.patches import PatchView, grid_of, taken
from vissl_zero.registry import LOSSES

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


@LOSSES.register("mae_loss", config=MAELossConfig)
class MAE(EmbeddingMethod):
    """MAE: pixels of hidden patches from the few that are seen.

    Only hidden patches are decoded: the loss looks at no others.

    Args: the fields of ``MAELossConfig``.
    """

    loss_sees_images = True

    def __init__(self, mask_ratio: float = 0.75, normalize_pixels: bool = True):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.normalize_pixels = normalize_pixels

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """A random part of the patches."""
        outputs: list[Any] = model(batch.images, see=self._see)
        return outputs

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's images; see ``mae_loss``. Collective."""
        output, (images,) = output_of(outputs, "predictions"), batch.images
        self._note(output.embeddings)
        height, width = images.shape[2] // output.grid[0], images.shape[3] // output.grid[1]
        num_pixels = height * width * images.shape[1]
        if output.predictions.shape[2] != num_pixels or height != width:
            must = f"must end in the numbers of a square patch, {num_pixels}"
            got = str(output.predictions.shape[2])
            fix = f"Write dims: [-1, <width>, {num_pixels}]."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.patch_predictor.dims", got, must, fix)])
        targets = taken(pixel_targets(images, height, self.normalize_pixels), output.wanted)
        return mae_loss(output.predictions, targets, targets.new_ones(output.wanted.shape))

    def collapse_rule(self, num_steps: int) -> None:
        """None: MAE has no embeddings whose collapse could be measured."""

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (own,) = images
        height, width = grid_of(own, patch_size)
        order = random_order(own, height * width, self.epoch, "mask")
        num_kept = max(1, int(height * width * (1 - self.mask_ratio)))
        return [PatchView(kept=order[:, :num_kept], wanted=order[:, num_kept:])]
