"""KoLeo: spreads embeddings by the distance to the nearest other one (Sablayrolles et al., arXiv 1806.03198).

As in DINOv2 (arXiv 2304.07193, section 4), except that the nearest neighbour is that among the samples of all ranks:
DINOv2's own code looks at one rank only, so its result depends on the number of GPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples


def koleo(embeddings: Tensor, eps: float = 1e-8, counts: SampleCounts | None = None) -> Tensor:
    """Mean over this rank's samples of minus the logarithm of the distance to the nearest other sample of all ranks.

    Args:
        embeddings: (n, D) of one view; not normalised.
        eps: added to differences and distances.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d; zero for a batch of one sample, which has no neighbour.
    Cost: an all-gather of the embeddings, n * N * D multiplications; an all-reduce of them in the backward pass.
    """
    counts = counts or count_samples(len(embeddings), embeddings.device)
    rows = F.normalize(at_least_float32(embeddings), dim=1, eps=eps)
    everyone = gather_samples(rows, counts)
    if counts.total < 2:
        return everyone.sum() * 0.0
    own = counts.first + torch.arange(counts.local, device=rows.device)
    with torch.no_grad():
        similarity = rows @ everyone.T
        nearest = similarity.scatter(1, own[:, None], -torch.inf).argmax(dim=1)
    distances = torch.linalg.vector_norm(rows - everyone[nearest] + eps, dim=1)
    return -torch.log(distances + eps).sum() / max(counts.local, 1)
