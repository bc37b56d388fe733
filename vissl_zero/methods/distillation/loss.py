"""Knowledge distillation from a frozen teacher's logits (Hinton et al., https://arxiv.org/abs/1503.02531)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


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
