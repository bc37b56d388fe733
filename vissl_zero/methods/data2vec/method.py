"""data2vec: its loss, its head, and the method as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.data2vec.keys import Data2VecLossConfig, LatentHeadConfig
from vissl_zero.methods.embedding import EmbeddingMethod, output_of
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.ijepa.method import latent_regression
from vissl_zero.methods.masks import as_mask, block_order
from vissl_zero.methods.method import Batch
from vissl_zero.models.patches import PatchView, Tokens, grid_of, taken
from vissl_zero.registry import HEADS, LOSSES


def mean_of_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """The mean over blocks of their tokens, each normalised over its features without learned weights.

    Args:
        blocks: K tensors (b, n, D).
    Returns:
        (b, n, D), in float32 at least.
    """
    normed = [F.layer_norm(at_least_float32(rows), rows.shape[-1:]) for rows in blocks]
    return torch.stack(normed).mean(dim=0)


class LatentOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        predictions: (b, m, D) for the patches asked for; None from a teacher, which predicts nothing.
        targets: (b, m, D) mean of the last blocks for them; None where no blocks were asked for.
    """

    embeddings: Tensor
    predictions: Tensor | None
    targets: Tensor | None


@HEADS.register("latent_head", config=LatentHeadConfig)
class LatentHead(nn.Module):
    """A linear layer from a masked patch's token to the teacher's embedding of it.

    Args: the fields of ``LatentHeadConfig``.

    Attributes:
        student_only: what a teacher's copy lacks.
    """

    student_only = ("output",)

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        if len(dims) != 2 or dims[0] != dims[1]:
            must, fix = "must be the trunk's features, twice", f"Write dims: {[dims[0]] * 2}."
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS.latent_head.dims", str(list(dims)), must, fix)])
        self.output: nn.Linear | None = nn.Linear(dims[0], dims[1])

    def forward(self, features: Tensor, tokens: list[Tokens]) -> LatentOutput:
        """Predictions and targets of images of one resolution."""
        (own,) = tokens
        predictions = None if self.output is None else self.output(own.wanted())
        if not own.blocks or own.view.wanted is None:
            return LatentOutput(features, predictions, None)
        patches = mean_of_blocks([rows[:, own.num_prefix :] for rows in own.blocks])
        return LatentOutput(features, predictions, taken(patches, own.view.wanted))


@LOSSES.register("data2vec_loss", config=Data2VecLossConfig)
class Data2Vec(EmbeddingMethod):
    """data2vec: a teacher's embeddings of masked patches, averaged over its last blocks.

    Targets are those of the authors' code for images (facebookresearch/data2vec_vision af9a363,
    beit/engine_for_cyclical.py): each block normalised, averaged, and normalised again.

    Args: the fields of ``Data2VecLossConfig``.
    """

    has_teacher = True
    couples_samples = False

    def __init__(
        self, momentum: float = 0.9998, mask_ratio: float = 0.6, average_top_k_layers: int = 6, beta: float = 2.0
    ):
        super().__init__()
        self.constant_momentum = momentum
        self.mask_ratio = mask_ratio
        self.average_top_k_layers = average_top_k_layers
        self.beta = beta

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All patches, some of them masked."""
        outputs: list[Any] = model(batch.images, see=partial(self._see, is_teacher=False))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Whole images, of which the last blocks' tokens are taken where the student's are masked."""
        outputs: list[Any] = model(batch.images, see=partial(self._see, is_teacher=True))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``latent_regression``."""
        student = output_of(outputs, "predictions")
        self._note(taught[0].embeddings)
        return latent_regression(student.predictions, taught[0].targets, self.beta)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self.constant_momentum

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int], is_teacher: bool) -> list[PatchView]:
        (own,) = images
        grid = grid_of(own, patch_size)
        num_patches = grid[0] * grid[1]
        num_masked = math.ceil(num_patches * self.mask_ratio - 1e-9)
        counts = torch.full((len(own),), num_masked, device=own.device)
        masked = block_order(own, grid, counts, self.epoch, "mask")[:, :num_masked]
        if is_teacher:
            return [PatchView(wanted=masked, last_blocks=self.average_top_k_layers)]
        return [PatchView(masked=as_mask(masked, num_patches), wanted=masked)]
