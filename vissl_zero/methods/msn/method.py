"""MSN as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vissl_zero.methods.embedding import EmbeddingMethod, images_of, output_of
from vissl_zero.methods.masks import random_order
from vissl_zero.methods.method import Batch
from vissl_zero.methods.msn.keys import MSNLossConfig
from vissl_zero.methods.msn.loss import msn_loss
from vissl_zero.models.patches import PatchView, grid_of
from vissl_zero.registry import LOSSES


@LOSSES.register("msn_loss", config=MSNLossConfig)
class MSN(EmbeddingMethod):
    """MSN: masked crops take the prototypes that a teacher gives the whole first crop.

    The student's prototypes score the teacher's embeddings too, so those pass through the student's head as a probe.

    Args: the fields of ``MSNLossConfig``, with output_dim known.
    """

    has_teacher = True

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        temperature: float = 0.1,
        sharpening: float = 0.25,
        mean_entropy_weight: float = 1.0,
        entropy_weight: float = 0.0,
        use_sinkhorn: bool = True,
        patch_drop: float = 0.15,
    ):
        super().__init__()
        self.guessing_loss = math.log(output_dim)
        self.first_momentum = momentum
        self.temperature = temperature
        self.sharpening = sharpening
        self.mean_entropy_weight = mean_entropy_weight
        self.entropy_weight = entropy_weight
        self.use_sinkhorn = use_sinkhorn
        self.patch_drop = patch_drop
        self._targets: Tensor | None = None

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The first crop, whole. Its embeddings are what the student scores next."""
        outputs: list[Any] = model(images_of(batch, [0]))
        self._targets = output_of(outputs, "embeddings").embeddings.detach()
        return outputs

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All other crops, patches left out of those of the first size."""
        crops = range(1, sum(batch.num_crops))
        outputs: list[Any] = model(images_of(batch, crops), self.probe(), see=self._see)
        return outputs

    def probe(self) -> Tensor | None:
        """The teacher's embeddings."""
        return self._targets

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``msn_loss``. Collective."""
        student = output_of(outputs, "probe_scores")
        self._note(student.embeddings)
        anchors = student.scores[0].unflatten(0, (sum(batch.num_crops) - 1, batch.num_local))
        return msn_loss(
            anchors,
            student.probe_scores[0],
            self.temperature,
            self.sharpening,
            self.mean_entropy_weight,
            self.entropy_weight,
            self.use_sinkhorn,
        )

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._linear_momentum(self.first_momentum, step)

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        height, width = grid_of(images[0], patch_size)
        num_kept = max(1, int(height * width * (1 - self.patch_drop)))
        order = random_order(images[0], height * width, self.epoch, "drop")
        return [PatchView(kept=order[:, :num_kept]), *(PatchView() for _ in images[1:])]
