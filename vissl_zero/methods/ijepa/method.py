"""I-JEPA: its loss, and the method as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.methods.embedding import EmbeddingMethod, output_of
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.ijepa.keys import IJEPALossConfig
from vissl_zero.methods.masks import block_targets, outside
from vissl_zero.methods.method import Batch
from vissl_zero.models.patches import PatchView, grid_of
from vissl_zero.registry import LOSSES


def latent_regression(predictions: Tensor, embeddings: Tensor, beta: float = 1.0) -> Tensor:
    """Smooth absolute error against the teacher's embeddings, each normalised over its features.

    Args:
        predictions: (n, ..., D), as many target patches for each image.
        embeddings: same shape, the teacher's, without gradient; not normalised.
        beta: differences below it are squared; 1 in I-JEPA, 2 in data2vec for ViT-B.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    targets = F.layer_norm(at_least_float32(embeddings.detach()), embeddings.shape[-1:])
    errors = F.smooth_l1_loss(at_least_float32(predictions), targets, beta=beta, reduction="sum")
    return errors / max(predictions.numel(), 1)


@LOSSES.register("ijepa_loss", config=IJEPALossConfig)
class IJEPA(EmbeddingMethod):
    """I-JEPA: a teacher's embeddings of blocks from the patches around them.

    The paper draws the size of targets for each batch and cuts the context to the smallest one of the batch. Here
    both have as many patches in every image, so that an image's masks do not depend on the others.

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
        """The context."""
        outputs: list[Any] = model(batch.images, see=partial(self._see, all_are_seen=False))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Whole images, of which the targets' embeddings are taken."""
        outputs: list[Any] = model(batch.images, see=partial(self._see, all_are_seen=True))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``latent_regression``."""
        student = output_of(outputs, "predictions")
        self._note(taught[0].embeddings)
        return latent_regression(student.predictions, taught[0].patches, self.beta)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._linear_momentum(self.first_momentum, step)

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int], all_are_seen: bool) -> list[PatchView]:
        (own,) = images
        grid = grid_of(own, patch_size)
        num_patches = grid[0] * grid[1]
        size = max(1, int(num_patches * self.target_scale))
        targets = block_targets(own, grid, self.num_targets, size, self.target_ratio, self.epoch, "targets")
        if all_are_seen:
            return [PatchView(wanted=targets)]
        num_seen = max(1, int(num_patches * self.context_scale))
        context = outside(own, targets, num_patches, self.epoch, "context")[:, :num_seen]
        return [PatchView(kept=context, wanted=targets)]
