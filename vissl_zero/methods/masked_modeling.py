"""Masked image modeling (MAE, SimMIM, MaskFeat, I-JEPA, data2vec): losses, heads and methods.

``PatchPredictor``, a narrow transformer, is MAE's decoder and I-JEPA's predictor.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vissl_zero.config.components.heads import PatchPredictorConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32, weighted_mean
from vissl_zero.methods.masked_modeling_keys import (
    Data2VecLossConfig,
    HOGHeadConfig,
    IJEPALossConfig,
    LatentHeadConfig,
    MAELossConfig,
    MaskFeatLossConfig,
    PixelHeadConfig,
    SimMIMLossConfig,
)
from vissl_zero.methods.method import Batch, EmbeddingMethod, output_of
from vissl_zero.models.model import Unit
from vissl_zero.models.patches import (
    PatchView,
    Tokens,
    as_mask,
    block_order,
    block_targets,
    grid_of,
    outside,
    random_order,
    sine_positions,
    taken,
)
from vissl_zero.models.trunks.vision_transformer import initialize_transformer_, layer_norm, truncated_normal_
from vissl_zero.registry import HEADS, LOSSES

_VARIANCE_EPS = 1e-6  # facebookresearch/mae models_mae.py
_DIMS = "config.MODEL.HEAD.PARAMS[0][1].dims"  # these methods have one head


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images into patches, (B, C, H, W) -> (B, P, patch_size^2 * C), row by row, channels innermost as in MAE.

    Raises:
        ValueError: the patch size does not divide the image.
    """
    height, width = images.shape[2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"images of {height} x {width} pixels have no whole patches of {patch_size} pixels")
    patches = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)  # (B, C, h, w, p, p)
    return patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


def pixel_targets(images: Tensor, patch_size: int, normalize: bool) -> Tensor:
    """Compute a decoder's targets, (B, P, patch_size^2 * C); ``normalize``: patches of mean 0 and variance 1."""
    patches = patchify(at_least_float32(images), patch_size)
    if not normalize:
        return patches
    # Unbiased, as ``var`` in models_mae.py.
    variances = patches.var(dim=2, keepdim=True)
    return (patches - patches.mean(dim=2, keepdim=True)) / (variances + _VARIANCE_EPS).sqrt()


def mae_loss(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Average the squared error of masked patches over their elements, then over the masked patches of all ranks.

    Args:
        predictions, targets: (n, P, E) of this rank's images; targets without gradient.
        mask: (n, P), True or 1 where a patch was hidden.
    Returns:
        0-d; the loop's mean over ranks is the mean over the masked patches of all ranks. Collective.
    Cost: one all-reduce of two numbers.
    """
    errors = (at_least_float32(predictions) - targets).square().mean(dim=2)
    return weighted_mean(errors, mask.to(errors.dtype), len(predictions))


class _MaskedReconstruction(EmbeddingMethod):
    """Base of methods that predict the content of the hidden or masked patches that ``_choose_patches`` draws."""

    loss_sees_images = True

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on the visible patches."""
        outputs: list[Any] = model(batch.images, choose_patches=self._choose_patches)
        return outputs

    def collapse_rule(self, num_steps: int) -> None:
        """Return None: there are no embeddings whose collapse could be measured."""

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        raise NotImplementedError


@LOSSES.register("mae_loss", config=MAELossConfig)
class MAE(_MaskedReconstruction):
    """MAE: pixels of hidden patches, predicted from the few visible ones.

    Only hidden patches are decoded: the loss ignores the others.

    Args: the fields of ``MAELossConfig``.
    """

    def __init__(self, mask_ratio: float = 0.75, normalize_pixels: bool = True):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.normalize_pixels = normalize_pixels

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's images; see ``mae_loss``. Collective."""
        output, (images,) = output_of(outputs, "predictions"), batch.images
        self._note(output.embeddings)
        height, width = images.shape[2] // output.grid[0], images.shape[3] // output.grid[1]
        num_pixels = height * width * images.shape[1]
        if output.predictions.shape[2] != num_pixels or height != width:
            must = f"must end in the numbers of a square patch, {num_pixels}"
            got = str(output.predictions.shape[2])
            fix = "Write -1 in its place, for as many as a patch has."
            raise ConfigError([Problem(_DIMS, got, must, fix)])
        targets = taken(pixel_targets(images, height, self.normalize_pixels), output.wanted)
        return mae_loss(output.predictions, targets, targets.new_ones(output.wanted.shape))

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (view,) = images
        height, width = grid_of(view, patch_size)
        order = random_order(view, height * width, self.epoch, "mask")
        # Truncated, as len_keep in models_mae.py.
        num_kept = max(1, int(height * width * (1 - self.mask_ratio)))
        return [PatchView(kept=order[:, :num_kept], wanted=order[:, num_kept:])]


def simmim_loss(predictions: Tensor, images: Tensor, mask: Tensor) -> Tensor:
    """Average the absolute error over the masked pixels of all ranks.

    Args:
        predictions, images: (n, C, H, W) of this rank's images.
        mask: (n, h, w), True or 1 where a patch was hidden; h divides H and w divides W.
    Returns:
        0-d; the loop's mean over ranks is the mean over the masked pixels of all ranks. Collective.
    Cost: one all-reduce of two numbers.
    """
    errors = (at_least_float32(predictions) - images).abs().mean(dim=1)  # (n, H, W)
    rows, columns = errors.shape[1] // mask.shape[1], errors.shape[2] // mask.shape[2]
    pixels = mask.repeat_interleave(rows, dim=1).repeat_interleave(columns, dim=2)
    return weighted_mean(errors, pixels.to(errors.dtype), len(predictions))


class PixelOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        patches: (b, h, w, C * p * p) pixels of each patch, channels outermost.
        mask: (b, h, w) bool, True where a patch was masked; None if none was.
    """

    embeddings: Tensor
    patches: Tensor
    mask: Tensor | None


@HEADS.register("pixel_head", config=PixelHeadConfig)
class PixelHead(nn.Module):
    """A linear layer from a patch's token to its pixels.

    Args: the fields of ``PixelHeadConfig``.
    """

    predicts_pixels = True

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        if len(dims) != 2:
            must = "must have two widths: the trunk's features and the numbers of a patch"
            raise ConfigError([Problem(_DIMS, str(list(dims)), must, "Write [-1, -1].")])
        self.output = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> PixelOutput:
        """Predict the pixels of images of one resolution."""
        (crop,) = tokens
        patches = self.output(crop.wanted().unflatten(1, crop.grid))
        mask = None if crop.view.masked is None else crop.view.masked.unflatten(1, crop.grid)
        return PixelOutput(features, patches, mask)


@LOSSES.register("simmim_loss", config=SimMIMLossConfig)
class SimMIM(_MaskedReconstruction):
    """SimMIM: pixels of masked patches, predicted by one linear layer.

    Args: the fields of ``SimMIMLossConfig``.
    """

    def __init__(self, mask_ratio: float = 0.6, mask_patch_size: int = 32):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.mask_patch_size = mask_patch_size

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's images; see ``simmim_loss``. Collective."""
        output, (images,) = output_of(outputs, "patches"), batch.images
        num_pixels, got = images[0].numel() // output.mask[0].numel(), output.patches.shape[3]
        if got != num_pixels:
            must = f"must end in the numbers of the trunk's patches, {num_pixels}"
            raise ConfigError([Problem(_DIMS, str(got), must, "Write [-1, -1].")])
        self._note(output.embeddings)
        # As in SimMIM, whose decoder is a 1x1 convolution and a pixel shuffle, with channels outermost in a patch.
        pixels = F.pixel_shuffle(output.patches.permute(0, 3, 1, 2), images.shape[2] // output.patches.shape[1])
        return simmim_loss(pixels, images, output.mask)

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (view,) = images
        grid, side = grid_of(view, patch_size), self.mask_patch_size
        if side % patch_size[0] or side % patch_size[1] or view.shape[2] % side or view.shape[3] % side:
            must = f"must be a multiple of the patches, {patch_size[0]}, and divide the images, {view.shape[2]} pixels"
            fix = f"Write {patch_size[0]}, for example."
            raise ConfigError([Problem("config.LOSS.simmim_loss.mask_patch_size", str(side), must, fix)])
        height, width = view.shape[2] // side, view.shape[3] // side
        # Rounded up, as in SimMIM's data_simmim.py; 1e-9 absorbs the rounding of the product: 100 * 0.55 is above 55.
        num_masked = math.ceil(height * width * self.mask_ratio - 1e-9)
        order = random_order(view, height * width, self.epoch, "mask")
        squares = as_mask(order[:, :num_masked], height * width).unflatten(1, (height, width))
        mask = squares.repeat_interleave(grid[0] // height, dim=1).repeat_interleave(grid[1] // width, dim=2)
        return [PatchView(masked=mask.flatten(1))]


def histograms_of_gradients(images: Tensor, num_bins: int, cell_size: int) -> Tensor:
    """Compute MaskFeat's HOG: histograms of each channel's gradients in cells that do not overlap.

    Follows ``HOGLayerC`` (facebookresearch/SlowFast 287ec00, slowfast/models/operators.py). Brightness and contrast of
    a channel do not change the histograms.

    Args:
        images: (B, C, H, W); cells divide H and W.
        num_bins: orientations from 0 to 180 degrees.
        cell_size: side of a cell, in pixels.
    Returns:
        (B, C, num_bins, H / cell_size, W / cell_size), in float32 at least.
    """
    padded = F.pad(at_least_float32(images), (1, 1, 1, 1), mode="reflect")
    # Sobel's filters, each as a smoothing and a difference.
    columns = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    rows = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    across, down = columns[..., :-2] - columns[..., 2:], rows[:, :, :-2] - rows[:, :, 2:]
    # The remainder: opposite gradients are 180 degrees apart, and share a bin.
    bins = (torch.atan2(across, down) / math.pi * num_bins).floor().long() % num_bins
    lengths = torch.stack((across, down)).norm(dim=0)
    # One bin for each pixel, weighted by the gradient's length: HOGLayerC does not interpolate between bins.
    spread = lengths.new_zeros(*lengths.shape[:2], num_bins, *lengths.shape[2:])
    spread.scatter_(2, bins[:, :, None], lengths[:, :, None])  # deterministic: no two pixels write to one element
    cells = spread.unflatten(4, (-1, cell_size)).unflatten(3, (-1, cell_size)).sum(dim=(4, 6))
    return F.normalize(cells, dim=2)


def hog_targets(images: Tensor, grid: tuple[int, int], num_bins: int, cell_size: int) -> Tensor:
    """Return the histograms of each patch's cells, (B, P, C * num_bins * cells of a patch)."""
    cells = histograms_of_gradients(images, num_bins, cell_size).flatten(1, 2)  # (B, C * bins, rows, columns)
    patches = cells.unflatten(3, (grid[1], -1)).unflatten(2, (grid[0], -1))  # (B, C * bins, h, r, w, c)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class HOGOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        predictions: (b, m, E) of the selected patches.
        wanted: (b, m) int64, indices of the selected patches.
        grid: patches per column and per row.
    """

    embeddings: Tensor
    predictions: Tensor
    wanted: Tensor
    grid: tuple[int, int]


@HEADS.register("hog_head", config=HOGHeadConfig)
class HOGHead(nn.Module):
    """A linear layer from a masked patch's token to the histograms of its cells.

    Args: the fields of ``HOGHeadConfig``.
    """

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        if len(dims) != 2:
            must = "must be two widths: the trunk's features, and the numbers of a patch's histograms"
            raise ConfigError([Problem(_DIMS, str(list(dims)), must, "Write [-1, 108], for example.")])
        self.output = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> HOGOutput:
        """Predict the histograms of the selected patches of images of one resolution."""
        (crop,) = tokens
        assert crop.view.wanted is not None
        return HOGOutput(features, self.output(crop.wanted()), crop.view.wanted, crop.grid)


@LOSSES.register("maskfeat_loss", config=MaskFeatLossConfig)
class MaskFeat(_MaskedReconstruction):
    """MaskFeat: histograms of oriented gradients of masked patches.

    Args: the fields of ``MaskFeatLossConfig``.
    """

    couples_samples = False

    def __init__(self, mask_ratio: float = 0.4, num_bins: int = 9, cell_size: int = 8):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.num_bins = num_bins
        self.cell_size = cell_size

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean squared error over this rank's images."""
        output, (images,) = output_of(outputs, "predictions"), batch.images
        self._note(output.embeddings)
        targets = taken(hog_targets(images, output.grid, self.num_bins, self.cell_size), output.wanted)
        if output.predictions.shape != targets.shape:
            must, number = "must end in channels times bins times cells of a patch", targets.shape[2]
            got = str(output.predictions.shape[2])
            raise ConfigError([Problem(_DIMS, got, must, f"Write {number} in its place.")])
        errors = (at_least_float32(output.predictions) - targets).square()
        # Every image has the same number of masked patches, so no weighted mean over ranks is needed.
        return errors.sum() / max(errors.numel(), 1)

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        (view,) = images
        if any(side % self.cell_size for side in patch_size):
            must, fix = f"must divide the patches, {patch_size[0]} pixels", f"Write {patch_size[0]}, for example."
            raise ConfigError([Problem("config.LOSS.maskfeat_loss.cell_size", str(self.cell_size), must, fix)])
        grid = grid_of(view, patch_size)
        num_patches = grid[0] * grid[1]
        num_masked = max(1, round(num_patches * self.mask_ratio))
        counts = torch.full((len(view),), num_masked, device=view.device)
        masked = block_order(view, grid, counts, self.epoch, "mask")[:, :num_masked]
        return [PatchView(masked=as_mask(masked, num_patches), wanted=masked)]


def latent_regression(predictions: Tensor, embeddings: Tensor, beta: float) -> Tensor:
    """Compute the smooth L1 distance from the teacher's embeddings, each normalized over its features.

    Args:
        predictions: (n, ..., D), the same number of target patches for each image.
        embeddings: the teacher's embeddings of the same shape; no gradient goes into them; not normalized.
        beta: differences below this are squared; 1 in I-JEPA, 2 in data2vec for ViT-B.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    # layer_norm without weights: targets have a constant scale, which the teacher cannot shrink (ijepa src/train.py).
    targets = F.layer_norm(at_least_float32(embeddings.detach()), embeddings.shape[-1:])
    errors = F.smooth_l1_loss(at_least_float32(predictions), targets, beta=beta, reduction="sum")
    return errors / max(predictions.numel(), 1)


@LOSSES.register("ijepa_loss", config=IJEPALossConfig)
class IJEPA(EmbeddingMethod):
    """I-JEPA: a teacher's embeddings of blocks, predicted from the patches around them.

    The paper draws one size of targets for each batch, and truncates the contexts to the smallest of the batch. Here
    targets and contexts have constant sizes, so that an image's masks do not depend on other images.

    Args: the fields of ``IJEPALossConfig``.
    """

    has_teacher = True

    def __init__(
        self,
        momentum: float = 0.996,
        num_targets: int = 4,
        target_scale: float = 0.175,
        target_ratio: Sequence[float] = (0.75, 1.5),
        context_scale: float = 0.3,
        beta: float = 1.0,
    ):
        super().__init__()
        self.first_momentum = momentum
        self.num_targets = num_targets
        self.target_scale = target_scale
        self.target_ratio = (target_ratio[0], target_ratio[1])
        self.context_scale = context_scale
        self.beta = beta

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on the context."""
        outputs: list[Any] = model(batch.images, choose_patches=partial(self._choose_patches, all_are_seen=False))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on whole images, and select its embeddings of the targets."""
        outputs: list[Any] = model(batch.images, choose_patches=partial(self._choose_patches, all_are_seen=True))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``latent_regression``."""
        student = output_of(outputs, "predictions")
        # The teacher's, because the student's embeddings are of a part of the image.
        self._note(teacher_outputs[0].embeddings)
        return latent_regression(student.predictions, teacher_outputs[0].patches, self.beta)

    def momentum(self, step: int) -> float:
        """Return the teacher's momentum; see ``Method``."""
        return self._linear_momentum(self.first_momentum, step, 1.0)

    def _choose_patches(
        self, images: Sequence[Tensor], patch_size: tuple[int, int], all_are_seen: bool
    ) -> list[PatchView]:
        (view,) = images
        grid = grid_of(view, patch_size)
        num_patches = grid[0] * grid[1]
        # One size for all targets: their embeddings are one tensor.
        size = max(1, int(num_patches * self.target_scale))
        targets = block_targets(view, grid, self.num_targets, size, self.target_ratio, self.epoch, "targets")
        if all_are_seen:
            return [PatchView(wanted=targets)]
        num_seen = max(1, int(num_patches * self.context_scale))
        # The context must not show what is predicted (section 3 of the paper).
        context = outside(view, targets, num_patches, self.epoch, "context")[:, :num_seen]
        return [PatchView(kept=context, wanted=targets)]


def mean_of_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """Compute the mean of blocks' tokens, each block normalized over its features without learned weights.

    Args:
        blocks: K tensors (b, n, D).
    Returns:
        (b, n, D), in float32 at least.
    """
    normed = [F.layer_norm(at_least_float32(rows), rows.shape[-1:]) for rows in blocks]
    return torch.stack(normed).mean(dim=0)


class LatentOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        predictions: (b, m, D) of the selected patches; None from a teacher, which has no output layer.
        targets: (b, m, D) mean of the last blocks' tokens of the selected patches; None if no blocks are requested.
    """

    embeddings: Tensor
    predictions: Tensor | None
    targets: Tensor | None


@HEADS.register("latent_head", config=LatentHeadConfig)
class LatentHead(nn.Module):
    """A linear layer from a masked patch's token to the teacher's embedding of this patch.

    Args: the fields of ``LatentHeadConfig``.

    Attributes:
        student_only: modules that the teacher's copy does not have.
    """

    student_only = ("output",)

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        if len(dims) != 2 or dims[0] != dims[1]:
            must, fix = "must be the trunk's features, twice", f"Write {[dims[0]] * 2}."
            raise ConfigError([Problem(_DIMS, str(list(dims)), must, fix)])
        self.output: nn.Linear | None = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> LatentOutput:
        """Compute predictions and targets of images of one resolution."""
        (crop,) = tokens
        predictions = None if self.output is None else self.output(crop.wanted())
        if not crop.blocks:
            return LatentOutput(features, predictions, None)
        assert crop.view.wanted is not None, "who asks for blocks asks for patches"
        patches = mean_of_blocks([rows[:, crop.num_prefix :] for rows in crop.blocks])
        return LatentOutput(features, predictions, taken(patches, crop.view.wanted))


@LOSSES.register("data2vec_loss", config=Data2VecLossConfig)
class Data2Vec(EmbeddingMethod):
    """data2vec: a teacher's embeddings of masked patches, averaged over its last blocks.

    Targets follow the authors' code for images (facebookresearch/data2vec_vision af9a363,
    beit/engine_for_cyclical.py): each block is normalized, the blocks are averaged, and the mean is normalized again.

    Args: the fields of ``Data2VecLossConfig``.
    """

    has_teacher = True
    couples_samples = False

    def __init__(
        self, momentum: float = 0.9998, mask_ratio: float = 0.6, average_top_k_layers: int = 6, beta: float = 2.0
    ):
        super().__init__()
        self.momenta = momentum, momentum
        self.mask_ratio = mask_ratio
        self.average_top_k_layers = average_top_k_layers
        self.beta = beta

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on images with masked patches."""
        outputs: list[Any] = model(batch.images, choose_patches=partial(self._choose_patches, is_teacher=False))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on whole images, and select its last blocks' tokens where the student's are masked."""
        outputs: list[Any] = model(batch.images, choose_patches=partial(self._choose_patches, is_teacher=True))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``latent_regression``."""
        student = output_of(outputs, "predictions")
        self._note(teacher_outputs[0].embeddings)
        return latent_regression(student.predictions, teacher_outputs[0].targets, self.beta)

    def _choose_patches(
        self, images: Sequence[Tensor], patch_size: tuple[int, int], is_teacher: bool
    ) -> list[PatchView]:
        (view,) = images
        grid = grid_of(view, patch_size)
        num_patches = grid[0] * grid[1]
        # 1e-9 absorbs the rounding of the product, as in SimMIM.
        num_masked = math.ceil(num_patches * self.mask_ratio - 1e-9)
        counts = torch.full((len(view),), num_masked, device=view.device)
        masked = block_order(view, grid, counts, self.epoch, "mask")[:, :num_masked]
        if is_teacher:
            return [PatchView(wanted=masked, last_blocks=self.average_top_k_layers)]
        return [PatchView(masked=as_mask(masked, num_patches), wanted=masked)]


_NORM: Any = layer_norm  # timm's type is a class, but it only calls it


class PatchOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        wanted: (b, ..., m) int64, indices of the selected patches.
        grid: patches per column and per row.
        patches: (b, ..., m, F) the trunk's embeddings of the selected patches; None if patches were dropped.
        predictions: (b, ..., m, E); None from a teacher, which has no predictor.
    """

    embeddings: Tensor
    wanted: Tensor
    grid: tuple[int, int]
    patches: Tensor | None
    predictions: Tensor | None


@HEADS.register("patch_predictor", config=PatchPredictorConfig)
class PatchPredictor(nn.Module):
    """A narrow transformer that predicts each group of hidden patches from the visible ones and mask tokens.

    Args: the fields of ``PatchPredictorConfig``.

    Attributes:
        student_only: modules that the teacher's copy does not have.
        predicts_pixels: -1 as the last width means the numbers of a patch.
    """

    student_only = ("predictor",)
    predicts_pixels = True

    def __init__(self, dims: Sequence[int], depth: int = 8, num_heads: int = 16):
        super().__init__()
        if len(dims) != 3:
            must = "must have three widths: of the trunk, of the predictor, of a prediction"
            raise ConfigError([Problem(_DIMS, str(list(dims)), must, "Write [-1, 512, 768], for example.")])
        # By 4: sine positions have sines and cosines of rows and of columns, a quarter of the width each.
        if dims[1] % num_heads or dims[1] % 4:
            must = f"must be a multiple of 4 and of num_heads, {num_heads}"
            raise ConfigError([Problem(_DIMS, str(dims[1]), must, "Change one of them.")])
        self.predictor: _Predictor | None = _Predictor(dims, depth, num_heads)

    def forward(self, features: Tensor, tokens: list[Tokens]) -> PatchOutput:
        """Predict the selected patches of images of one resolution."""
        (crop,) = tokens
        wanted = crop.view.wanted
        assert wanted is not None, "a method that has predictions asks for patches"
        predictions = None if self.predictor is None else self.predictor(crop.rows, crop, wanted)
        return PatchOutput(features, wanted, crop.grid, crop.wanted() if crop.view.kept is None else None, predictions)


class _Predictor(nn.Module):
    def __init__(self, dims: Sequence[int], depth: int, num_heads: int):
        super().__init__()
        self.width = dims[1]
        self.embedding = nn.Linear(dims[0], dims[1])
        self.mask_token = nn.Parameter(torch.zeros(dims[1]))
        # timm's block, the one of the authors' decoder.
        blocks = (Block(dims[1], num_heads, qkv_bias=True, norm_layer=_NORM) for _ in range(depth))
        self.blocks = nn.ModuleList(Unit(OrderedDict(unit=block)) for block in blocks)
        self.norm = layer_norm(dims[1])
        self.output = nn.Linear(dims[1], dims[2])

    def forward(self, rows: Tensor, tokens: Tokens, wanted: Tensor) -> Tensor:
        """Predict (b, ..., m, E): each group of m patches separately, from prefix tokens and patches in ``rows``."""
        visible: Tensor = self.embedding(rows)
        # Again, since the trunk's position embeddings have another width.
        positions = sine_positions(tokens.grid, self.width, visible)
        num_prefix, kept = tokens.num_prefix, tokens.view.kept
        places = positions.expand(len(visible), -1, -1) if kept is None else positions[kept]
        visible = torch.cat([visible[:, :num_prefix], visible[:, num_prefix:] + places], dim=1)
        groups = wanted.flatten(1, -2) if wanted.ndim > 2 else wanted[:, None]  # (b, T, m)
        num_groups, num_wanted = groups.shape[1:]
        hidden = (self.mask_token.to(visible.dtype) + positions[groups]).flatten(0, 1)
        # I-JEPA predicts each target block alone: a group attends to the context, not to other groups.
        xs = [torch.cat([visible.repeat_interleave(num_groups, dim=0), hidden], dim=1)]
        for block in self.blocks:
            xs = block(xs)
        predictions: Tensor = self.output(self.norm(xs[0][:, -num_wanted:]).view(*wanted.shape, -1))
        return predictions

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize the weights as those of a vision transformer."""
        initialize_transformer_(self, generator_for)
        truncated_normal_(self.mask_token, generator_for("mask_token"))
