"""Feature distillation: its losses, and the method as the loop runs it.

The queue's form is lightly-train's ``distillation`` 1, the distance of features as they are its ``distillationv2``
(https://github.com/lightly-ai/lightly-train, ``src/lightly_train/_methods``). There each process has a queue of its
own, here all share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.methods.feature_distillation_keys import FeatureDistillationLossConfig
from vissl_zero.methods.gather import EmbeddingQueue, at_least_float32
from vissl_zero.methods.method import Batch, EmbeddingMethod
from vissl_zero.models.model import Model
from vissl_zero.registry import LOSSES


def queue_distillation_loss(student: Tensor, teacher: Tensor, classes: Tensor, temperature: float = 0.07) -> Tensor:
    """Compute the KL divergence of the softmax of similarities to ``classes``, student from teacher.

    Args:
        student, teacher: (n, D) unit rows; no gradient goes into the teacher's.
        classes: (M, D) unit rows, the teacher's features of some images, without gradient.
        temperature: divides the similarities.
    Returns:
        0-d, the mean over this rank's rows. No communication.
    Cost: 4 * n * M * D multiplications.
    """
    log_probabilities = F.log_softmax(student @ classes.T / temperature, dim=1)
    log_targets = F.log_softmax(teacher.detach() @ classes.T / temperature, dim=1)
    return F.kl_div(log_probabilities, log_targets, reduction="sum", log_target=True) / max(len(student), 1)


def feature_distance(student: Tensor, teacher: Tensor, normalize: bool = True) -> Tensor:
    """Compute the squared distance of features.

    Args:
        student, teacher: (n, ..., D); no gradient goes into the teacher's.
        normalize: of unit vectors, which is 2 minus 2 cosines; else the mean over features as they are.
    Returns:
        0-d, the mean over this rank's rows. No communication.
    """
    if not normalize:
        return (student - teacher.detach()).square().sum() / max(student.numel(), 1)
    squares = (F.normalize(student, dim=-1) - F.normalize(teacher.detach(), dim=-1)).square()
    return squares.sum() * student.shape[-1] / max(student.numel(), 1)


@LOSSES.register("feature_distillation_loss", config=FeatureDistillationLossConfig)
class FeatureDistillation(EmbeddingMethod):
    """Feature distillation: the features of a teacher, of weights of any origin.

    Args: the fields of ``FeatureDistillationLossConfig``, with the width and both normalizations known.

    Attributes:
        queue: the teacher's features of the last steps; None where nothing is compared with them.
    """

    has_teacher = True
    teacher_follows = False

    def __init__(
        self,
        embedding_dim: int,
        teacher: str = "",
        queue_weight: float = 1.0,
        global_weight: float = 0.0,
        normalize: bool = True,
        temperature: float = 0.07,
        queue_size: int = 8192,
        teacher_mean: Sequence[float] = (0.0,),
        teacher_std: Sequence[float] = (1.0,),
        student_mean: Sequence[float] = (0.0,),
        student_std: Sequence[float] = (1.0,),
    ):
        super().__init__()
        self.teacher = teacher
        self.queue_weight, self.global_weight = queue_weight, global_weight
        self.normalize, self.temperature = normalize, temperature
        self.queue = EmbeddingQueue(1, queue_size, embedding_dim) if queue_weight else None
        self.couples_samples = self.queue is not None
        # From images normalized for the student to those normalized for the teacher: (x * std + mean - mean') / std'.
        colors = list(zip(student_mean, student_std, teacher_mean, teacher_std, strict=True))
        self._scales = [std / other_std for _, std, _, other_std in colors]
        self._shifts = [(mean - other_mean) / other_std for mean, _, other_mean, other_std in colors]
        self._is_recolored = any(scale != 1 for scale in self._scales) or any(self._shifts)

    def make_teacher(self, model: Model) -> Model:
        """Return the model under DISTILLATION, with its weights, as it is."""
        return model.requires_grad_(False)

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on all crops, normalized as its weights expect."""
        outputs: list[Any] = model([self._recolored(images) for images in batch.images])
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's crops; see ``queue_distillation_loss``. Collective with a queue."""
        student, teacher = at_least_float32(outputs[0]), at_least_float32(teacher_outputs[0])
        self._note(student)
        terms = []
        if self.queue is not None:
            unit = F.normalize(teacher, dim=1)
            classes = self._classes(self.queue, _by_sample(unit, batch))
            divergence = queue_distillation_loss(F.normalize(student, dim=1), unit, classes, self.temperature)
            terms.append(self.queue_weight * divergence)
        if self.global_weight:
            terms.append(self.global_weight * feature_distance(student, teacher, self.normalize))
        return torch.stack(terms).sum()

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the teacher's features, where there is a queue."""
        assert teacher_outputs is not None
        if self.queue is None:
            return None
        return _by_sample(F.normalize(at_least_float32(teacher_outputs[0]), dim=1), batch)[None]

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the teacher's features. Collective."""
        for features in reversed(observed):  # so that their order in the queue is that of one batch
            if self.queue is not None:
                self.queue.push(features)

    def _classes(self, queue: EmbeddingQueue, newest: Tensor) -> Tensor:
        """Gather the teacher's features of the batch of all ranks, and past ones, as many as the queue has places."""
        past = queue.embeddings[0, : queue.num_filled].to(newest.dtype)
        return torch.cat((collectives.all_gather_rows(newest), past))[: queue.embeddings.shape[1]]

    def _recolored(self, images: Tensor) -> Tensor:
        """Normalize images (b, 3, H, W) as the teacher's, which are normalized as the student's."""
        if not self._is_recolored:
            return images
        scales, shifts = (images.new_tensor(values)[:, None, None] for values in (self._scales, self._shifts))
        return images * scales + shifts


def _by_sample(rows: Tensor, batch: Batch) -> Tensor:
    """Order crop-major rows (V * n, D) by sample, so that rows of all ranks have one order on any number of them."""
    return rows.unflatten(0, (sum(batch.num_crops), batch.num_local)).transpose(0, 1).flatten(0, 1)
