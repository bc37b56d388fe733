"""k-nearest-neighbour classification of features: how good a trunk is, without training anything on top of it.

Source: the weighted vote of https://arxiv.org/abs/1805.01978, as DINO and VISSL use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.collectives import all_gather_rows, rank, world_size
from vissl_zero.data.order import rank_slice
from vissl_zero.evaluation.features import Features

_CHUNK_ELEMENTS = 2**22  # similarities at once: 32 MiB in float64
# Between equally near neighbours the first in the index is chosen, also when the features of all images are the same (a
# collapsed model): similarities are lowered by this much of the largest one per place. For a million images that is
# less than float32 can tell apart.
_TIE_BREAK = 2.0**-48


def nearest(
    queries: Tensor, index: Tensor, num_neighbours: int, is_cosine: bool = True, excluded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The most similar rows of ``index`` for each query, most similar first; of equals, the first in the index.

    Args:
        queries: (Q, F) features.
        index: (N, F) features.
        num_neighbours: k; fewer are returned if the index has fewer.
        is_cosine: compare directions; else dot products.
        excluded: (Q,) for each query the one place of the index that does not count (the query itself), or None.
    Returns:
        similarities (Q, k) float64 and places in the index (Q, k) int64. Not a collective.
    """
    if is_cosine:
        queries, index = F.normalize(queries, dim=1), F.normalize(index, dim=1)
    num_neighbours = min(num_neighbours, len(index) - (excluded is not None))
    places = torch.arange(len(index), device=index.device, dtype=torch.float64)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, len(index)))
    found = []
    for start in range(0, len(queries), chunk):
        similarities = (queries[start : start + chunk] @ index.T).double()
        keys = similarities - similarities.abs().amax(dim=1, keepdim=True) * _TIE_BREAK * places
        if excluded is not None:
            keys.scatter_(1, excluded[start : start + chunk, None], -torch.inf)
        chosen = keys.topk(num_neighbours, dim=1).indices
        found.append((similarities.gather(1, chosen), chosen))
    if not found:
        return places.new_zeros(0, num_neighbours), places.new_zeros(0, num_neighbours, dtype=torch.int64)
    return torch.cat([s for s, _ in found]), torch.cat([p for _, p in found])


def vote(similarities: Tensor, labels: Tensor, sigma: float, num_classes: int) -> Tensor:
    """The class with the largest sum of ``exp(similarity / sigma)``; of equals, the lowest.

    Args:
        similarities: (Q, k) of the neighbours.
        labels: (Q, k) int64, their classes.
        sigma: temperature; the smaller, the more the nearest count.
        num_classes: classes are 0 to num_classes - 1.
    Returns:
        (Q,) int64.
    """
    # Relative to the nearest: a common factor, without which a small sigma would overflow.
    weights = ((similarities - similarities.amax(dim=1, keepdim=True)) / sigma).exp()
    sums = weights.new_zeros(len(labels), num_classes).scatter_add_(1, labels, weights)
    is_largest = sums == sums.amax(dim=1, keepdim=True)
    return is_largest.int().argmax(dim=1)


def knn_top1(
    queries: Features,
    index: Features,
    num_neighbours: int = 20,
    sigma: float = 0.07,
    is_cosine: bool = True,
    excluded: Tensor | None = None,
) -> float | None:
    """``knn_top1s`` of one number of neighbours and one temperature."""
    found = knn_top1s(queries, index, [(num_neighbours, sigma)], is_cosine, excluded)
    return None if found is None else found[0]


def knn_top1s(
    queries: Features,
    index: Features,
    votes: Sequence[tuple[int, float]],
    is_cosine: bool = True,
    excluded: Tensor | None = None,
) -> list[float] | None:
    """Shares of queries whose neighbours vote for their class. Collective: each rank looks up its share of the queries.

    Args:
        queries: Q images, equal on every rank, as are all others.
        index: N images.
        votes: of each vote, how many neighbours take part and its temperature.
        is_cosine: compare directions; else dot products.
        excluded: as for ``nearest``.
    Returns:
        0 to 1 for each vote, equal on every rank; None if queries or index have no labels.
    Cost: Q * N * F / ranks multiplications, and an all-gather for each vote.
    """
    if queries.labels is None or index.labels is None:
        return None
    own = rank_slice(len(queries.rows), rank(), world_size())
    without = None if excluded is None else excluded[own]
    similarities, places = nearest(queries.rows[own], index.rows, max(k for k, _ in votes), is_cosine, without)
    num_classes = int(max(index.labels.max(), queries.labels.max())) + 1
    shares = []
    for k, sigma in votes:
        predicted = all_gather_rows(vote(similarities[:, :k], index.labels[places[:, :k]], sigma, num_classes))
        shares.append(float((predicted == queries.labels).double().mean()))
    return shares
