"""Self-distillation of masked patches: iBOT (https://arxiv.org/abs/2111.07832, equation 2).

The class token's part is ``dino_loss``; targets come from ``Centre`` or ``sinkhorn_targets`` of DINO.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32


def masked_patch_loss(student: Tensor, targets: Tensor, mask: Tensor, student_temperature: float = 0.1) -> Tensor:
    """Cross-entropy of masked patches against the teacher's, which saw them: mean within images, then over images.

    Only masked patches are given, so that heads need not be run on the others: ``tokens[mask]``.

    Args:
        student: (m, K) scores of the masked patches, in the order of ``mask``.
        targets: (m, K) probabilities of the same patches from the teacher, without gradient.
        mask: (I, P) bool, the masked patches of each of this rank's I images (views included); m are True.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's I images; one without masked patches counts as zero. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=1)
    per_image = 1 / mask.sum(dim=1, keepdim=True).clamp(min=1).to(log_probabilities.dtype)
    weights = per_image.expand(mask.shape)[mask]
    return -((targets * log_probabilities).sum(dim=1) * weights).sum() / max(len(mask), 1)
