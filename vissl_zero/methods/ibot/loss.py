"""Self-distillation of masked patches: iBOT (https://arxiv.org/abs/2111.07832, equation 2).

The class token's part is ``dino_loss``; targets come from ``Centre`` or ``sinkhorn_targets`` of DINO.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


def masked_patch_loss(student: Tensor, targets: Tensor, is_masked: Tensor, student_temperature: float = 0.1) -> Tensor:
    """Cross-entropy of masked patches against the teacher's, which saw them: mean within images, then over images.

    As many patches of every image are given, so that shapes do not depend on masks; those not masked do not count.

    Args:
        student: (I, m, K) scores of some patches of each of this rank's I images (views included).
        targets: (I, m, K) probabilities of the same patches from the teacher, without gradient.
        is_masked: (I, m) bool, which of them count.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's I images; one without masked patches counts as zero. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    weights = is_masked / is_masked.sum(dim=1, keepdim=True).clamp(min=1).to(log_probabilities.dtype)
    return -((targets * log_probabilities).sum(dim=2) * weights).sum() / max(len(student), 1)
