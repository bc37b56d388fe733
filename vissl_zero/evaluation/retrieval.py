"""How well a ranking finds images: mean average precision and precision at k, with images that do not count.

Source: https://arxiv.org/abs/1803.11285 (Revisiting Oxford and Paris), whose protocol VISSL's
``vissl/utils/instance_retrieval_utils/evaluate.py`` at 09270ed2 follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

AT = (1, 5, 10)  # the k of precision at k


@dataclass(frozen=True)
class Wanted:
    """What one query should find.

    Attributes:
        query: number of the query.
        good: numbers of the images of the database that show the same.
        ignored: numbers of those that count neither way.
        num_good: how many good ones there are, those outside of the database too; None: ``len(good)``.
    """

    query: int
    good: np.ndarray
    ignored: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_good: int | None = None


def average_precision(places: np.ndarray, num_good: int) -> float:
    """Area under precision over recall, by trapezoids.

    Args:
        places: of the good images in the ranking, from 0, ascending; ignored images are left out of the count.
        num_good: how many there are.
    """
    found = np.arange(len(places))
    before = np.where(places == 0, 1.0, found / np.maximum(places, 1))
    after = (found + 1) / (places + 1)
    return float((before + after).sum() / 2 / num_good)


def scores(similarity: np.ndarray, wanted: Sequence[Wanted]) -> tuple[float, list[float]]:
    """Mean average precision, and mean precision at each k of ``AT``; NaN where no query has a good image.

    A query without one is left out. A query whose last good image stands before k counts as of there.

    Args:
        similarity: (queries, images), higher is more alike. Of equals, the first image stands first.
        wanted: for some or all of the queries. Numbers at or above ``images`` are left out.
    """
    precisions, at = [], []
    for query in wanted:
        ranking = np.argsort(-similarity[query.query], kind="stable")
        good = query.good[query.good < len(ranking)]
        if not len(good):
            continue
        counted = ranking[~np.isin(ranking, query.ignored)]
        places = np.flatnonzero(np.isin(counted, good))
        precisions.append(average_precision(places, query.num_good or len(good)))
        last = [min(int(places[-1]) + 1, k) if len(places) else k for k in AT]
        at.append([float((places < k).sum() / k) for k in last])
    if not precisions:
        return float("nan"), [float("nan")] * len(AT)
    return float(np.mean(precisions)), np.mean(at, axis=0).tolist()
