"""DINO, iBOT and KoLeo together: DINOv2 (https://arxiv.org/abs/2304.07193, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from vissl_zero.methods.dino.loss import dino_loss, sinkhorn_targets
from vissl_zero.methods.gather import SampleCounts
from vissl_zero.methods.ibot.loss import masked_patch_loss
from vissl_zero.methods.koleo import koleo


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
