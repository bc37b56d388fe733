"""Nearest neighbours in feature space, as pictures for the report."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    excluded: Tensor | None = None,
    num_queries: int = 6,
    num_neighbours: int = 5,
) -> Neighbours:
    """Neighbours of a few images, evenly spread over the source (so over its class folders too). Not a collective.

    Args:
        query_source, index_source: where the images are from.
        queries, index: features of their images.
        is_cosine: compare directions; else dot products.
        excluded: place in the index, per query, that does not count (the query itself), or None.
        num_queries, num_neighbours: how many at most.
    """
    ids = middles(len(query_source), num_queries)
    places = torch.tensor(ids, device=queries.rows.device)
    chosen, without = queries.at(places), None if excluded is None else excluded[places]
    _, found = nearest(chosen.rows, index.rows, num_neighbours, is_cosine, without)
    matches = None
    if chosen.labels is not None and index.labels is not None:
        matches = (index.labels[found] == chosen.labels[:, None]).tolist()
    return Neighbours(query_source, index_source, ids, found.tolist(), matches)


def middles(length: int, number: int) -> list[int]:
    """The middle places of ``number`` equal parts of ``length`` places, or all places if there are fewer."""
    number = min(number, length)
    return [(2 * part + 1) * length // (2 * number) for part in range(number)]
