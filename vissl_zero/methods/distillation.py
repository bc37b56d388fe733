"""Distillation from a trained, frozen teacher: logits, prototype scores, assignments; losses and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import ModelConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.dino import Center, PatchDistillation, masked_patch_loss
from vissl_zero.methods.distillation_keys import (
    WEIGHTS_FILE,
    DINODistillationLossConfig,
    DistillationLossConfig,
    IBOTDistillationLossConfig,
    SwAVDistillationLossConfig,
    teacher_folder,
)
from vissl_zero.methods.gather import EmbeddingQueue, at_least_float32, sinkhorn, weighted_mean
from vissl_zero.methods.method import Batch, EmbeddingMethod, output_of
from vissl_zero.methods.supervised import targets_of
from vissl_zero.models.model import Model, build_model
from vissl_zero.models.patches import PatchView, with_patches_dropped
from vissl_zero.registry import LOSSES
from vissl_zero.resolve.saved import RESOLVED_FILE, read_saved, with_references


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, loss_type: str) -> Tensor:
    """Compute the KL divergence of softened probabilities, student from teacher, times the squared temperature.

    Args:
        student, teacher: (n, C) logits; no gradient goes into the teacher's.
        temperature: divides the logits of both.
        loss_type: kl_divergence; cross_entropy, which adds the teacher's entropy; mse of the logits without softmax.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    if loss_type == "mse":
        return (at_least_float32(student) - at_least_float32(teacher.detach())).square().sum() / max(student.numel(), 1)
    log_probabilities = F.log_softmax(at_least_float32(student) / temperature, dim=1)
    # Logarithms on both sides: products of small probabilities would lose digits.
    log_targets = F.log_softmax(at_least_float32(teacher.detach()) / temperature, dim=1)
    if loss_type == "cross_entropy":
        divergence = -(log_targets.exp() * log_probabilities).sum()
    else:
        divergence = F.kl_div(log_probabilities, log_targets, reduction="sum", log_target=True)
    # Gradients of softened probabilities scale with 1 / T^2 (arXiv 1503.02531, section 2).
    return divergence * temperature**2 / max(len(student), 1)


_KEY = "config.LOSS.distillation_loss.teacher"
_NO_LABEL = -1


@LOSSES.register("distillation_loss", config=DistillationLossConfig)
class KnowledgeDistillation(EmbeddingMethod):
    """Distillation: the student learns the probabilities of a trained, frozen classifier.

    Args: the fields of ``DistillationLossConfig``.
    """

    has_teacher = True
    teacher_follows = False

    def __init__(
        self,
        teacher: str = "",
        loss_type: str = "kl_divergence",
        temperature: float = 1.0,
        soft_target_alpha: float = 1.0,
    ):
        super().__init__()
        self.teacher = teacher
        self.loss_type = loss_type
        self.temperature = temperature
        self.soft_target_alpha = soft_target_alpha
        self.couples_samples = soft_target_alpha < 1  # the hard loss divides by the number of labels in the batch

    def make_teacher(self, model: Model) -> Model:
        """Return the frozen model of the run ``teacher``, or without one the model under DISTILLATION.

        Args:
            model: the model under DISTILLATION with its weights, if ``teacher`` is empty; else unused.
        Raises:
            ConfigError: the run folder cannot be read, or its files belong to different runs.
        """
        if not self.teacher:
            return model.requires_grad_(False)
        folder = teacher_folder(self.teacher)
        try:
            saved = with_references(read_saved(folder / RESOLVED_FILE)["config"])
            teacher = build_model(block_of(ModelConfig, saved["MODEL"]))
            dtypes = {name: tensor.dtype for name, tensor in teacher.state_dict().items()}
            # Through numpy and assign=True: in a dry run new torch tensors have no memory, but the weights do.
            arrays = load_file(folder / WEIGHTS_FILE).items()
            weights = {name: torch.from_numpy(array).to(dtypes[name]) for name, array in arrays}
            teacher.load_state_dict(weights, assign=True)
        except (OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
            must = f"must be the folder of a run that has ended ({' '.join(str(error).split())[:200]})"
            raise ConfigError([Problem(_KEY, self.teacher, must, "Name another run, or train it again.")]) from error
        return teacher.requires_grad_(False)

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's crops; see ``distillation_loss``. Collective where labels count.

        Raises:
            ConfigError: student and teacher have different numbers of outputs.
        """
        student, teacher = at_least_float32(outputs[0]), teacher_outputs[0]
        if student.shape != teacher.shape:
            must = f"must end in the teacher's {teacher.shape[1]} outputs"
            got = f"{student.shape[1]} outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", got, must, "Correct the last of dims.")])
        self._note(student)
        soft = distillation_loss(student, teacher, self.temperature, self.loss_type)
        # Images need labels only where the hard loss counts.
        if self.soft_target_alpha == 1:
            return soft
        targets = targets_of(batch)
        errors = F.cross_entropy(student, targets, ignore_index=_NO_LABEL, reduction="none")
        hard = weighted_mean(errors, (targets != _NO_LABEL).to(errors.dtype), batch.num_local)
        return self.soft_target_alpha * soft + (1 - self.soft_target_alpha) * hard


def dino_distillation_loss(
    student: Tensor, targets: Tensor, student_temperature: float, swapped_assignment: bool
) -> Tensor:
    """Compute the cross-entropy of the student's crops against the teacher's, paired as in VISSL's loss of this name.

    Args:
        student: (V, n, K) scores; the teacher's crops come first, in the same order.
        targets: (T, n, K) probabilities, without gradient; T at most V.
        student_temperature: divides the student's scores.
        swapped_assignment: pair each of the teacher's crops with all other crops; else with itself and with the crops
            that the teacher does not see.
    Returns:
        0-d, the mean over pairs and this rank's samples. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    count, views = len(targets), len(student)
    # Sums over crops before products: cross-entropy is linear in both (see dino_loss).
    same = (targets * log_probabilities[:count]).sum()
    if swapped_assignment:
        total = (targets.sum(dim=0) * log_probabilities.sum(dim=0)).sum() - same
        num_pairs = count * (views - 1)
    else:
        total = (targets.sum(dim=0) * log_probabilities[count:].sum(dim=0)).sum() + same
        num_pairs = count * (views - count + 1)
    return -total / max(num_pairs * student.shape[1], 1)


@LOSSES.register("dino_distillation_loss", config=DINODistillationLossConfig)
class DINODistillation(EmbeddingMethod):
    """Distillation of prototype scores from a trained, frozen teacher, which sees the first crops.

    Args: the fields of ``DINODistillationLossConfig``, with student_num_crops and output_dim known.
    """

    has_teacher = True
    teacher_follows = False
    teacher_crops: Sequence[int]

    def __init__(
        self,
        student_num_crops: int,
        teacher: str = "",
        teacher_num_crops: int = 2,
        teacher_temperature: float = 0.07,
        student_temperature: float = 0.1,
        ema_center: float | None = None,
        output_dim: int | None = None,
        swapped_assignment: bool = False,
        patch_drop: float = 0.0,
    ):
        super().__init__()
        self.teacher = teacher
        self.center = None if ema_center is None or output_dim is None else Center(output_dim, ema_center)
        # A center is a mean over the batch, which ties samples to each other.
        self.couples_samples = self.center is not None
        self.patch_drop = patch_drop
        self.teacher_crops = list(range(teacher_num_crops))
        self.num_crops = student_num_crops
        self.temperatures = teacher_temperature, student_temperature
        self.swapped_assignment = swapped_assignment

    def make_teacher(self, model: Model) -> Model:
        """Return the model under DISTILLATION, with its weights, frozen."""
        return model.requires_grad_(False)

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on all crops; ``patch_drop`` drops patches of crops of the first size."""
        if not self.patch_drop:
            return super().run_student(model, batch)
        outputs: list[Any] = model(batch.images, choose_patches=self._choose_patches)
        return outputs

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        return with_patches_dropped(images, patch_size, self.patch_drop, self.epoch)

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``dino_distillation_loss``.

        Raises:
            ConfigError: student and teacher have different numbers of scores.
        """
        student, teacher = _scores(outputs[0]), at_least_float32(_scores(teacher_outputs[0]))
        _require_scores(student, teacher)
        self._note(student)
        if self.center is None:
            targets = F.softmax(teacher / self.temperatures[0], dim=1)
        else:
            targets = self.center.targets(teacher, self.temperatures[0])
        return dino_distillation_loss(
            student.unflatten(0, (self.num_crops, batch.num_local)),
            targets.unflatten(0, (len(self.teacher_crops), batch.num_local)),
            self.temperatures[1],
            self.swapped_assignment,
        )

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the sums of the teacher's scores for the center; None without a center."""
        assert teacher_outputs is not None
        return None if self.center is None else self.center.sums(_scores(teacher_outputs[0]))

    def update_state(self, observed: Sequence[Any]) -> None:
        """Move the center. Collective."""
        if self.center is not None:
            self.center.update(torch.stack(tuple(observed)).sum(dim=0))


@LOSSES.register("ibot_distillation_loss", config=IBOTDistillationLossConfig)
class IBOTDistillation(PatchDistillation):
    """Distillation of scores of crops and masked patches from a trained, frozen teacher, which sees the large crops.

    Args: the fields of ``IBOTDistillationLossConfig``, with student_num_crops and num_global_crops known.
    """

    teacher_follows = False
    # Unlike iBOT itself: a frozen teacher's scores are not centered.
    couples_samples = False

    def __init__(
        self,
        student_num_crops: int,
        num_global_crops: int = 2,
        student_temp: float = 0.1,
        teacher_temp: float = 0.07,
        teacher_patch_temp: float = 0.07,
        lambda1: float = 1.0,
        lambda2: float = 1.0,
        swapped_assignment: bool = False,
        mask_ratio: Sequence[float] = (0.1, 0.5),
        mask_probability: float = 0.5,
    ):
        super().__init__(num_global_crops, mask_ratio, mask_probability)
        self.num_crops = student_num_crops
        self.student_temp, self.teacher_temps = student_temp, (teacher_temp, teacher_patch_temp)
        self.weights = lambda1, lambda2
        self.swapped_assignment = swapped_assignment

    def make_teacher(self, model: Model) -> Model:
        """Return the model under DISTILLATION, with its weights, frozen."""
        return model.requires_grad_(False)

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``dino_distillation_loss`` and ``masked_patch_loss``.

        Raises:
            ConfigError: student and teacher have different numbers of scores.
        """
        student, teacher = output_of(outputs, "patch_scores"), teacher_outputs[0]
        _require_scores(student.scores, teacher.scores)
        _require_scores(student.patch_scores.flatten(0, 1), teacher.patch_scores.flatten(0, 1))
        self._note(student.embeddings)
        of_crops, of_patches = (
            F.softmax(at_least_float32(scores) / temperature, dim=-1)
            for scores, temperature in zip((teacher.scores, teacher.patch_scores), self.teacher_temps, strict=True)
        )
        views = self.by_view(student.scores, batch, self.num_crops)
        targets = self.by_view(of_crops, batch)
        crops = dino_distillation_loss(views, targets, self.student_temp, self.swapped_assignment)
        patches = masked_patch_loss(student.patch_scores, of_patches, student.is_masked, self.student_temp)
        return self.weights[0] * crops + self.weights[1] * patches


@LOSSES.register("swav_distillation_loss", config=SwAVDistillationLossConfig)
class SwAVDistillation(EmbeddingMethod):
    """Distillation of SwAV's assignments from a trained, frozen teacher, which sees the first one or two crops.

    Args: the fields of ``SwAVDistillationLossConfig``, with sizes known.

    Attributes:
        prototypes: buffer (K, D), a copy of the teacher's prototypes.
        queue: past embeddings of the teacher, scored again in each step; None if its length is 0.
    """

    has_teacher = True
    teacher_follows = False
    teacher_crops: Sequence[int]
    prototypes: Tensor

    def __init__(
        self,
        num_crops: int,
        num_prototypes: Sequence[int],
        embedding_dim: int,
        queue_length: int,
        temperature: float = 0.1,
        epsilon: float = 0.03,
        num_iters: int = 3,
        use_double_precision: bool = False,
        temp_hard_assignment_iters: int = 0,
        local_queue_length: int = 0,
        queue_start_iter: int = 0,
        normalize_student_feats: bool = False,
        use_student_prototypes: bool = True,
        use_teacher_prototypes: bool = False,
        use_two_crops_for_teacher: bool = True,
        swapped_assignment: bool = False,
    ):
        super().__init__()
        self.num_crops = num_crops
        self.temperature, self.epsilon, self.num_iters = temperature, epsilon, num_iters
        self.dtype = torch.float64 if use_double_precision else torch.float32
        self.num_hard_steps, self.queue_start = temp_hard_assignment_iters, queue_start_iter
        self.is_normalized = normalize_student_feats
        self.uses_own_prototypes, self.uses_teachers = use_student_prototypes, use_teacher_prototypes
        self.teacher_crops = [0, 1] if use_two_crops_for_teacher else [0]
        self.swapped_assignment = swapped_assignment
        # A copy on every rank: the teacher's own may be sharded, and are whole only in its forward pass.
        self.register_buffer("prototypes", torch.zeros(num_prototypes[0], embedding_dim))
        self.queue = EmbeddingQueue(1, queue_length, embedding_dim) if queue_length else None

    def make_teacher(self, model: Model) -> Model:
        """Return the model under DISTILLATION, with its weights, frozen; copy its prototypes."""
        head: Any = model.heads[0]
        # While they are whole: the teacher is sharded after this.
        self.prototypes.copy_(head.prototypes0.weight.detach())
        return model.requires_grad_(False)

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; pairs of crops as in ``dino_distillation_loss``. Collective.

        Raises:
            ConfigError: the width of the student's output differs from the teacher's embeddings or prototypes.
        """
        student = self._student_rows(outputs[0])
        self._note(student)
        if self.is_normalized:
            student = F.normalize(student)
        width = self.prototypes.shape[1 if self.uses_teachers else 0]
        if student.shape[1] != width:
            of = "the width of the teacher's embeddings" if self.uses_teachers else "the teacher's prototypes"
            must = f"must end in {width}, {of}"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", f"{student.shape[1]}", must, "Correct the head.")])
        scores = student @ self.prototypes.to(student.dtype).T if self.uses_teachers else student
        shape = (len(self.teacher_crops), batch.num_local)
        targets = self._assign(at_least_float32(teacher_outputs[0].scores[0]).unflatten(0, shape))
        return dino_distillation_loss(
            self._upcast(scores).unflatten(0, (self.num_crops, batch.num_local)),
            targets,
            self.temperature,
            self.swapped_assignment,
        )

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the teacher's embeddings (1, T * n, D) for the queue; None before the queue starts."""
        if self.queue is None or self._step < self.queue_start:
            return None
        assert teacher_outputs is not None
        rows = at_least_float32(teacher_outputs[0].embeddings).unflatten(0, (len(self.teacher_crops), batch.num_local))
        # By sample, then crop: gathered rows have the same order on any number of ranks.
        return rows.transpose(0, 1).flatten(0, 1)[None]

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the teacher's embeddings. Collective."""
        if self.queue is not None:
            for embeddings in observed:
                if embeddings is not None:
                    self.queue.push(embeddings)

    @torch.no_grad()
    def _assign(self, scores: Tensor) -> Tensor:
        """Compute assignments (T, B, K) of scores (T, B, K), balanced together with the rows of the queue."""
        num_samples = scores.shape[1]
        # No rows at all would cost a copy of the scores.
        if self.queue is not None and self.queue.num_filled and self._step >= self.queue_start:
            past = self.queue.local_part().to(scores.dtype) @ self.prototypes.to(scores.dtype).T
            scores = torch.cat((scores, past.expand(len(scores), -1, -1)), dim=1)
        # Rows of the queue only balance the assignments: no student learns from them.
        assigned = sinkhorn(self._upcast(scores), self.epsilon, self.num_iters)[:, :num_samples]
        if self._step < self.num_hard_steps:
            return F.one_hot(assigned.argmax(dim=2), assigned.shape[2]).to(assigned.dtype)
        return assigned

    def _student_rows(self, output: Any) -> Tensor:
        """Return the student's rows: the output of an mlp, or embeddings or scores of a head with prototypes."""
        if isinstance(output, Tensor):
            return at_least_float32(output)
        return at_least_float32(output.scores[0] if self.uses_own_prototypes else output.embeddings)

    def _upcast(self, scores: Tensor) -> Tensor:
        return scores.to(torch.promote_types(scores.dtype, self.dtype))


def _require_scores(student: Tensor, teacher: Tensor) -> None:
    """Raise ConfigError unless both have the same number of scores, (n, K)."""
    if student.shape[1] != teacher.shape[1]:
        must = f"must end in the teacher's {teacher.shape[1]} scores"
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", f"{student.shape[1]}", must, "Correct the head.")])


def _scores(output: Any) -> Tensor:
    """Return the scores of the first layer of prototypes, or the output of an mlp."""
    scores: Tensor = output.scores[0] if hasattr(output, "scores") else output
    return scores
