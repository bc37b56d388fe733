"""DINOv2: its loss, and the method as the loop runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vissl_zero.methods.dino.method import dino_loss, sinkhorn_targets
from vissl_zero.methods.dinov2.keys import DINOv2LossConfig
from vissl_zero.methods.embedding import output_of
from vissl_zero.methods.gather import SampleCounts
from vissl_zero.methods.ibot.method import PatchDistillation, masked_patch_loss
from vissl_zero.methods.koleo import koleo
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


def dinov2_loss(
    class_scores: tuple[Tensor, Tensor],
    patch_scores: tuple[Tensor, Tensor],
    is_masked: Tensor,
    class_tokens: Tensor,
    teacher_temperature: float,
    student_temperature: float = 0.1,
    weights: tuple[float, float, float] = (1.0, 1.0, 0.1),
    counts: SampleCounts | None = None,
) -> Tensor:
    """The three terms, weighted. Targets are centred by Sinkhorn over the rows of all ranks. Collective.

    Args:
        class_scores: the student's (V, n, K) and the teacher's (T, n, K).
        patch_scores: the student's and the teacher's (T * n, m, K) of some patches of the student's first T views,
            view-major.
        is_masked: (T * n, m) bool, which of them were masked; the others do not count.
        class_tokens: (T, n, D) the student's class tokens of these views before the head, for KoLeo.
        teacher_temperature: divides the teacher's scores.
        student_temperature: divides the student's.
        weights: of DINO, iBOT and KoLeo; KoLeo is added up over views, as in the paper's code.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d, the mean over this rank's samples.
    """
    dino = dino_loss(class_scores[0], sinkhorn_targets(class_scores[1], teacher_temperature), student_temperature)
    patch_targets = sinkhorn_targets(patch_scores[1], teacher_temperature, counts=is_masked)
    ibot = masked_patch_loss(patch_scores[0], patch_targets, is_masked, student_temperature)
    spread = torch.stack([koleo(view, counts=counts) for view in class_tokens]).sum()
    return weights[0] * dino + weights[1] * ibot + weights[2] * spread


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
