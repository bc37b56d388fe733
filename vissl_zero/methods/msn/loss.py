"""Matching soft assignments of masked views to prototypes: MSN (https://arxiv.org/abs/2204.07141, equation 1)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import at_least_float32, sum_over_ranks
from vissl_zero.methods.sinkhorn import sinkhorn


def msn_loss(
    anchors: Tensor,
    target: Tensor,
    temperature: float = 0.1,
    sharpening: float = 0.25,
    mean_entropy_weight: float = 1.0,
    entropy_weight: float = 0.0,
    use_sinkhorn: bool = False,
) -> Tensor:
    """Cross-entropy of masked anchors against the sharpened target, minus the entropy of the mean prediction.

    Args:
        anchors: (V, n, K) cosine similarities of the student's masked views to the prototypes.
        target: (n, K) of the teacher's unmasked view to the same prototypes; no gradient goes into it.
        temperature: divides the cosine similarities.
        sharpening: exponent 1 / sharpening of the target's probabilities.
        mean_entropy_weight: weight of ln K minus the entropy of the mean prediction over the anchors of all ranks.
        entropy_weight: weight of the mean entropy of the predictions.
        use_sinkhorn: bring the targets to equal use of the prototypes over the samples of all ranks.
    Returns:
        0-d: the mean over this rank's anchors, plus the mean-entropy term, the same on every rank. Collective.
    Cost: one all-reduce of K + 1 numbers, again in the backward pass; with Sinkhorn, six more of K numbers.
    """
    log_probabilities = F.log_softmax(at_least_float32(anchors) / temperature, dim=2)
    with torch.no_grad():
        log_targets = F.log_softmax(at_least_float32(target) / (temperature * sharpening), dim=1)
        # Rounds of Sinkhorn on probabilities are those on their logarithms with epsilon 1.
        targets = sinkhorn(log_targets[None], 1.0, 3)[0] if use_sinkhorn else log_targets.exp()
    probabilities = log_probabilities.exp()
    num_anchors = anchors.shape[0] * anchors.shape[1]
    loss = -(targets * log_probabilities).sum() / max(num_anchors, 1)
    sums = sum_over_ranks(torch.cat((probabilities.sum(dim=(0, 1)), probabilities.new_tensor([num_anchors]))))
    mean = sums[:-1] / sums[-1].detach().clamp(min=1)
    loss = loss + mean_entropy_weight * (math.log(len(mean)) + torch.special.xlogy(mean, mean).sum())
    if entropy_weight:
        loss = loss - entropy_weight * (probabilities * log_probabilities).sum() / max(num_anchors, 1)
    return loss
