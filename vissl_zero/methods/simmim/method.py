"""SimMIM as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.embedding import EmbeddingMethod, output_of
from vissl_zero.methods.masks import as_mask, random_order
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simmim.keys import SimMIMLossConfig
from vissl_zero.methods.simmim.loss import simmim_loss
from vissl_zero.models.patches import PatchView, grid_of
from vissl_zero.registry import LOSSES


@LOSSES.register("simmim_loss", config=SimMIMLossConfig)
class SimMIM(EmbeddingMethod):
    """SimMIM: pixels of masked patches by one linear layer.

    Args: the fields of ``SimMIMLossConfig``.
    """

    loss_sees_images = True

    def __init__(self, mask_ratio: float = 0.6, mask_patch_size: int = 32):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.mask_patch_size = mask_patch_size

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All patches, some of them masked."""
        outputs: list[Any] = model(batch.images, see=self._see)
        return outputs

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over this rank's images; see ``simmim_loss``. Collective."""
        output, (images,) = output_of(outputs, "pixels"), batch.images
        if output.pixels.shape != images.shape:
            num_pixels, got = (tensor[0].numel() // output.mask[0].numel() for tensor in (images, output.pixels))
            must = f"must end in the numbers of the trunk's patches, {num_pixels}"
            fix = f"Write dims: [-1, {num_pixels}]."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.pixel_head.dims", str(got), must, fix)])
        self._note(output.embeddings)
        return simmim_loss(output.pixels, images, output.mask)

    def collapse_rule(self, num_steps: int) -> None:
        """None: pixels are not alike."""

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (own,) = images
        grid, side = grid_of(own, patch_size), self.mask_patch_size
        if side % patch_size[0] or side % patch_size[1] or own.shape[2] % side or own.shape[3] % side:
            must = f"must be a multiple of the patches, {patch_size[0]}, and divide the images, {own.shape[2]} pixels"
            fix = f"Write {patch_size[0]}, say."
            raise ConfigError([Problem("config.LOSS.simmim_loss.mask_patch_size", str(side), must, fix)])
        height, width = own.shape[2] // side, own.shape[3] // side
        num_masked = math.ceil(height * width * self.mask_ratio - 1e-9)
        order = random_order(own, height * width, self.epoch, "mask")
        squares = as_mask(order[:, :num_masked], height * width).unflatten(1, (height, width))
        mask = squares.repeat_interleave(grid[0] // height, dim=1).repeat_interleave(grid[1] // width, dim=2)
        return [PatchView(masked=mask.flatten(1))]
