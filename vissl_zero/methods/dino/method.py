"""DINO as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vissl_zero.methods.dino.keys import DINOLossConfig
from vissl_zero.methods.dino.loss import Centre, dino_loss
from vissl_zero.methods.embedding import EmbeddingMethod, images_of, output_of
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


@LOSSES.register("dino_loss", config=DINOLossConfig)
class DINO(EmbeddingMethod):
    """DINO: self-distillation from a teacher that sees the large crops.

    Args: the fields of ``DINOLossConfig``, with output_dim known.
    """

    has_teacher = True

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        student_temp: float = 0.1,
        teacher_temp_min: float = 0.04,
        teacher_temp_max: float = 0.07,
        teacher_temp_warmup_iters: int = 37500,
        crops_for_teacher: Sequence[int] = (0, 1),
        ema_center: float = 0.9,
    ):
        super().__init__()
        self.guessing_loss = math.log(output_dim)
        self.centre = Centre(output_dim, ema_center)
        self.first_momentum = momentum
        self.student_temp = student_temp
        self.teacher_temps = teacher_temp_min, teacher_temp_max
        self.num_warmup_steps = teacher_temp_warmup_iters
        self.crops_for_teacher = list(crops_for_teacher)
        self._step = 0
        self._scores: Tensor | None = None

    def on_step(self, step: int, epoch: int) -> None:
        """Remember where the run is: the teacher's temperature warms up."""
        super().on_step(step, epoch)
        self._step = step

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The teacher's crops only."""
        outputs: list[Any] = model(images_of(batch, self.crops_for_teacher))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``dino_loss``."""
        student = output_of(outputs, "scores").scores[0].unflatten(0, (sum(batch.num_crops), batch.num_local))
        scores = taught[0].scores[0].unflatten(0, (len(self.crops_for_teacher), batch.num_local))
        self._note(outputs[0].embeddings)
        self._scores = scores
        return dino_loss(student, self.centre.targets(scores, self._temperature()), self.student_temp)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Move the centre. Collective."""
        assert self._scores is not None
        self.centre.update(self._scores)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)

    def _temperature(self) -> float:
        low, high = self.teacher_temps
        return low + (high - low) * min(self._step / max(self.num_warmup_steps, 1), 1.0)
