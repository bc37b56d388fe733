"""Self-distillation between views: DINO (https://arxiv.org/abs/2104.14294, algorithm 1).

The teacher's scores become targets by one of two ways: ``Centre`` (a running mean is taken off, DINO and iBOT), or
``sinkhorn_targets`` (all prototypes are used equally, SwAV and DINOv2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.sinkhorn import sinkhorn


def dino_loss(student: Tensor, targets: Tensor, student_temperature: float = 0.1) -> Tensor:
    """Cross-entropy of every student view against the target of every other teacher view, averaged over pairs.

    Args:
        student: (V, n, K) scores; the teacher's views come first, in the same order.
        targets: (T, n, K) probabilities of the teacher's views, without gradient; T at most V.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's samples and the T * (V - 1) pairs of different views. No communication.
    """
    num_teacher_views, num_views = len(targets), len(student)
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    total = -(targets.sum(dim=0) * log_probabilities.sum(dim=0)).sum()
    same_view = -(targets * log_probabilities[:num_teacher_views]).sum()
    num_pairs = num_teacher_views * (num_views - 1)
    return (total - same_view) / max(num_pairs * student.shape[1], 1)


@torch.no_grad()
def sinkhorn_targets(teacher: Tensor, temperature: float, num_iters: int = 3, counts: Tensor | None = None) -> Tensor:
    """Targets that use all prototypes equally over the rows of all ranks (arXiv 2304.07193). Collective.

    Args:
        teacher: (..., K) scores; any number of rows, also none.
        temperature: divides the scores.
        counts: (...) bool, rows that are used equally; None: all.
    Returns:
        Shape of ``teacher``, rows sum to 1.
    Cost: see ``sinkhorn``.
    """
    rows = at_least_float32(teacher).flatten(0, -2)
    counted = None if counts is None else counts.reshape(1, -1)
    return sinkhorn(rows[None], temperature, num_iters, counted)[0].view(teacher.shape)


class Centre(nn.Module):
    """Running mean of the teacher's scores over the rows of all ranks, which keeps one prototype from winning them all.

    Args:
        num_prototypes: K.
        momentum: weight of the past.

    Attributes:
        mean: buffer (K,), identical on every rank.
    """

    mean: Tensor

    def __init__(self, num_prototypes: int, momentum: float = 0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(num_prototypes))

    @torch.no_grad()
    def targets(self, teacher: Tensor, temperature: float) -> Tensor:
        """Softmax of the centred scores (..., K); shape of ``teacher``. No communication."""
        return F.softmax((at_least_float32(teacher) - self.mean) / temperature, dim=-1)

    @torch.no_grad()
    def update(self, teacher: Tensor, counts: Tensor | None = None) -> None:
        """Move the mean towards that of the scores (..., K), over the rows of all ranks. Collective.

        Args:
            teacher: scores.
            counts: (...) bool, rows that count; None: all.

        Rows that are not finite leave the mean as it is: the step is one that the loss scaler skips.

        Cost: one all-reduce of K + 1 numbers.
        """
        rows = teacher.flatten(0, -2).to(self.mean.dtype)
        weights = rows.new_ones(len(rows)) if counts is None else counts.flatten().to(rows.dtype)
        sums = collectives.all_reduce_sum(torch.cat((weights @ rows, weights.sum()[None])))
        newest = self.mean.lerp(sums[:-1] / sums[-1].clamp(min=1), 1 - self.momentum)
        self.mean.copy_(torch.where((sums[-1] > 0) & newest.isfinite().all(), newest, self.mean))
