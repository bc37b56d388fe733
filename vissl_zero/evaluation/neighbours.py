"""Which images a trunk holds to be alike, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vissl_zero.data.source import Source
from vissl_zero.evaluation.features import Features
from vissl_zero.evaluation.knn import nearest


@dataclass(frozen=True)
class Neighbours:
    """Some images and their nearest neighbours; equal on every rank.

    Attributes:
        query_source, index_source: where the images are from (``source.image(id)``).
        query_ids: Q places in ``query_source``.
        neighbour_ids: Q lists of K places in ``index_source``, nearest first.
        matches: Q lists of K, whether the neighbour has the query's label; None without labels.
    """

    query_source: Source
    index_source: Source
    query_ids: list[int]
    neighbour_ids: list[list[int]]
    matches: list[list[bool]] | None


def find_neighbours(
    query_source: Source,
    index_source: Source,
    queries: Features,
    index: Features,
    is_cosine: bool = True,
    num_queries: int = 6,
    num_neighbours: int = 5,
) -> Neighbours:
    """Neighbours of a few images, evenly spread over the source (so over its class folders too). Not a collective.

    Args:
        query_source, index_source: may be the same; an image is then no neighbour of itself.
        queries, index: features of their images.
        is_cosine: compare directions; else dot products.
        num_queries, num_neighbours: how many at most.
    """
    num_queries = min(num_queries, len(query_source))
    ids = [(2 * i + 1) * len(query_source) // (2 * num_queries) for i in range(num_queries)]
    places = torch.tensor(ids, device=queries.rows.device)
    excluded = places if query_source is index_source else None
    _, found = nearest(queries.rows[places], index.rows, num_neighbours, is_cosine, excluded)
    matches = None
    if queries.labels is not None and index.labels is not None:
        matches = (index.labels[found] == queries.labels[places, None]).tolist()
    return Neighbours(query_source, index_source, ids, found.tolist(), matches)
