"""DINOv2 as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vissl_zero.methods.dinov2.keys import DINOv2LossConfig
from vissl_zero.methods.dinov2.loss import dinov2_loss
from vissl_zero.methods.embedding import output_of
from vissl_zero.methods.ibot.method import PatchDistillation
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


@LOSSES.register("dinov2_loss", config=DINOv2LossConfig)
class DINOv2(PatchDistillation):
    """DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centring.

    Which crops are masked, and how much, is drawn for each by itself; the paper's code masks exactly half of a batch.

    Args: the fields of ``DINOv2LossConfig``, with num_global_crops known.
    """

    def __init__(
        self,
        num_global_crops: int = 2,
        momentum: float = 0.992,
        student_temp: float = 0.1,
        teacher_temp_min: float = 0.04,
        teacher_temp_max: float = 0.07,
        teacher_temp_warmup_iters: int = 37500,
        dino_weight: float = 1.0,
        ibot_weight: float = 1.0,
        koleo_weight: float = 0.1,
        mask_ratio: Sequence[float] = (0.1, 0.5),
        mask_probability: float = 0.5,
    ):
        super().__init__(num_global_crops, mask_ratio, mask_probability)
        self.first_momentum = momentum
        self.student_temp = student_temp
        self.teacher_temps = teacher_temp_min, teacher_temp_max
        self.num_warmup_steps = teacher_temp_warmup_iters
        self.weights = dino_weight, ibot_weight, koleo_weight
        self._step = 0

    def on_step(self, step: int, epoch: int) -> None:
        """Remember where the run is: the teacher's temperature warms up."""
        super().on_step(step, epoch)
        self._step = step

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``dinov2_loss``. Collective."""
        student, teacher = output_of(outputs, "patch_scores"), taught[0]
        self._note(student.embeddings)
        low, high = self.teacher_temps
        num_views = sum(batch.num_crops)
        return dinov2_loss(
            (self.by_view(student.scores, batch, num_views), self.by_view(teacher.scores, batch)),
            (student.patch_scores, teacher.patch_scores),
            student.is_masked,
            self.by_view(student.features, batch, num_views)[: self.num_global_crops],
            low + (high - low) * min(self._step / max(self.num_warmup_steps, 1), 1.0),
            self.student_temp,
            self.weights,
        )

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)
