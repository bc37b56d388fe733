"""Distillation: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from vissl_zero.config.saved import RESOLVED_FILE, read_saved, with_references
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.distillation.keys import WEIGHTS_FILE, DistillationLossConfig, teacher_folder
from vissl_zero.methods.embedding import EmbeddingMethod
from vissl_zero.methods.gather import at_least_float32, weighted_mean
from vissl_zero.methods.method import Batch
from vissl_zero.methods.supervised.method import targets_of
from vissl_zero.models.model import Model, build_model
from vissl_zero.registry import LOSSES


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of the student's from the teacher's softened probabilities, times the squared temperature.

    Args:
        student, teacher: (n, C) logits; no gradient goes into the teacher's.
        temperature: divides both.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / temperature, dim=1)
    log_targets = F.log_softmax(at_least_float32(teacher.detach()) / temperature, dim=1)
    divergence = F.kl_div(log_probabilities, log_targets, reduction="sum", log_target=True)
    return divergence * temperature**2 / max(len(student), 1)


_KEY = "config.LOSS.distillation_loss.teacher"
_NO_LABEL = -1


@LOSSES.register("distillation_loss", config=DistillationLossConfig)
class Distillation(EmbeddingMethod):
    """Distillation: the probabilities of a trained, frozen classifier.

    Args: the fields of ``DistillationLossConfig``.
    """

    has_teacher = True
    teacher_follows = False

    def __init__(self, teacher: str, temperature: float = 1.0, soft_target_alpha: float = 1.0):
        super().__init__()
        self.teacher = teacher
        self.temperature = temperature
        self.soft_target_alpha = soft_target_alpha
        self.couples_samples = soft_target_alpha < 1  # the number of labels divides

    def make_teacher(self, model: Model) -> Model:
        """The trained model of another run; nothing of the one that is trained here.

        Raises:
            ConfigError: its folder cannot be read, or its files are not of one run.
        """
        folder = teacher_folder(self.teacher)
        try:
            saved = with_references(read_saved(folder / RESOLVED_FILE)["config"])
            teacher = build_model(saved["MODEL"])
            dtypes = {name: tensor.dtype for name, tensor in teacher.state_dict().items()}
            # By way of numpy, and assigned: a dry run makes tensors without memory, and these have values.
            arrays = load_file(folder / WEIGHTS_FILE).items()
            weights = {name: torch.from_numpy(array).to(dtypes[name]) for name, array in arrays}
            teacher.load_state_dict(weights, assign=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            must = f"must be the folder of a run that has ended ({' '.join(str(error).split())[:200]})"
            raise ConfigError([Problem(_KEY, self.teacher, must, "Write another, or train it again.")]) from error
        return teacher.requires_grad_(False)

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples and crops; see ``distillation_loss``. Collective where labels count.

        Raises:
            ConfigError: student and teacher have other numbers of outputs.
        """
        student, teacher = at_least_float32(outputs[0]), taught[0]
        if student.shape != teacher.shape:
            must = f"must end in the teacher's {teacher.shape[1]} outputs"
            got = f"{student.shape[1]} outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", got, must, "Correct the last of dims.")])
        self._note(student)
        soft = distillation_loss(student, teacher, self.temperature)
        if self.soft_target_alpha == 1:
            return soft
        targets = targets_of(batch)
        errors = F.cross_entropy(student, targets, ignore_index=_NO_LABEL, reduction="none")
        hard = weighted_mean(errors, (targets != _NO_LABEL).to(errors.dtype), batch.num_local)
        return self.soft_target_alpha * soft + (1 - self.soft_target_alpha) * hard
