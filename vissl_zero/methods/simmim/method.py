"""SimMIM: its loss, its head, and the method as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.embedding import EmbeddingMethod, output_of
from vissl_zero.methods.gather import at_least_float32, weighted_mean
from vissl_zero.methods.masks import as_mask, random_order
from vissl_zero.methods.method import Batch
from vissl_zero.methods.simmim.keys import PixelHeadConfig, SimMIMLossConfig
from vissl_zero.models.patches import PatchView, Tokens, grid_of
from vissl_zero.registry import HEADS, LOSSES


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


class PixelOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        pixels: (b, 3, H, W).
        mask: (b, h, w) bool, True where a patch was masked; None if none was.
    """

    embeddings: Tensor
    pixels: Tensor
    mask: Tensor | None


@HEADS.register("pixel_head", config=PixelHeadConfig)
class PixelHead(nn.Module):
    """A linear layer from a patch's token to its pixels.

    Args: the fields of ``PixelHeadConfig``.
    """

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        self.patch_size = math.isqrt(dims[-1] // 3)
        if len(dims) != 2 or 3 * self.patch_size**2 != dims[-1]:
            must = "must be the trunk's features and 3 times the pixels of a square patch"
            fix = "Write dims: [-1, 768] for patches of 16 pixels."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.pixel_head.dims", str(list(dims)), must, fix)])
        self.output = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> PixelOutput:
        """Pixels of images of one resolution."""
        (own,) = tokens
        patches = self.output(own.wanted()).unflatten(1, own.grid).unflatten(3, (3, self.patch_size, self.patch_size))
        # (b, h, w, 3, p, p) -> (b, 3, h * p, w * p)
        pixels = patches.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), 3, own.grid[0] * self.patch_size, -1)
        mask = None if own.view.masked is None else own.view.masked.unflatten(1, own.grid)
        return PixelOutput(features, pixels, mask)


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
        """None: SimMIM has no embeddings whose collapse could be measured."""

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (own,) = images
        grid, side = grid_of(own, patch_size), self.mask_patch_size
        if side % patch_size[0] or side % patch_size[1] or own.shape[2] % side or own.shape[3] % side:
            must = f"must be a multiple of the patches, {patch_size[0]}, and divide the images, {own.shape[2]} pixels"
            fix = f"Write {patch_size[0]}, for example."
            raise ConfigError([Problem("config.LOSS.simmim_loss.mask_patch_size", str(side), must, fix)])
        height, width = own.shape[2] // side, own.shape[3] // side
        num_masked = math.ceil(height * width * self.mask_ratio - 1e-9)
        order = random_order(own, height * width, self.epoch, "mask")
        squares = as_mask(order[:, :num_masked], height * width).unflatten(1, (height, width))
        mask = squares.repeat_interleave(grid[0] // height, dim=1).repeat_interleave(grid[1] // width, dim=2)
        return [PatchView(masked=mask.flatten(1))]
