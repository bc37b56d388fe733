"""How images are found: one vector an image from its feature maps, whitened, and how well a ranking does.

One vector an image by regional maxima (R-MAC) or generalised means (GeM). A ranking's mean average precision and
precision at k leave out images that do not count.

Sources: https://arxiv.org/abs/1511.05879 (R-MAC), https://arxiv.org/abs/1711.02512 (GeM),
https://arxiv.org/abs/1803.11285 (Revisiting Oxford and Paris); constants and protocol of VISSL's
``vissl/utils/instance_retrieval_utils`` at 09270ed2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vissl_zero.collectives import all_reduce_sum

_OVERLAP = 0.4  # of neighbouring regions, as wanted
_MOST_STEPS = 7


def unit_vectors(rows: Tensor, epsilon: float = 0.0) -> Tensor:
    """Vectors (..., F) divided by their L2 norm plus ``epsilon``; those of zeros stay so."""
    norms = rows.norm(dim=-1, keepdim=True) + epsilon
    return rows / torch.where(norms > 0, norms, torch.ones_like(norms))


def regions(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """Squares on a map: top, left and side of each, level by level.

    Level l has l squares along the shorter side, and as many more along the longer one at every level as make
    neighbours overlap by about 40 %. Levels that are finer than the map are left out.
    """
    short, long = min(height, width), max(height, width)
    steps = np.arange(2, _MOST_STEPS + 1, dtype=np.float64)  # as NumPy 2 runs VISSL; NumPy 1 breaks ties in float32
    overlaps = (short**2 - short * ((long - short) / (steps - 1))) / short**2
    more = int(np.abs(overlaps - _OVERLAP).argmin()) + 1
    found = []
    for level in range(1, levels + 1):
        side = 2 * short // (level + 1)
        if side:
            tops = _places(height, side, level + more * (height > width))
            lefts = _places(width, side, level + more * (width > height))
            found += [(top, left, side) for top in tops for left in lefts]
    return found


def _places(length: int, side: int, count: int) -> list[int]:
    """Where ``count`` squares begin, spread over a length; around their centres, so that VISSL's are rounded alike."""
    gap = (length - side) / (count - 1) if count > 1 else 0.0
    centre = np.floor(side / 2 - 1)
    return [min(int(np.floor(centre + gap * index) - centre), length - side) for index in range(count)]


def regional_maxima(maps: Tensor, levels: int, normalize: bool = True) -> Tensor:
    """The largest value of each channel in each region.

    Args:
        maps: (B, C, H, W).
        levels: of ``regions``.
        normalize: to unit length.
    Returns:
        (B, R, C).
    """
    found = [
        maps[:, :, top : top + side, left : left + side].amax(dim=(2, 3))
        for top, left, side in regions(maps.shape[2], maps.shape[3], levels)
    ]
    rows = torch.stack(found, dim=1)
    return unit_vectors(rows) if normalize else rows


def generalized_mean(maps: Tensor, power: float) -> Tensor:
    """Means of powers over the map, then their roots, and a constant 1 behind them, as in VISSL.

    Args:
        maps: (B, C, H, W); values below 1e-6 count as that.
        power: 1: the mean, of negative values too.
    Returns:
        (B, C + 1).
    """
    rows = maps.mean(dim=(2, 3)) if power == 1 else maps.clamp(min=1e-6).pow(power).mean(dim=(2, 3)).pow(1 / power)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)


def descriptor(maps: Sequence[Tensor], kind: str, power: float, normalize: bool) -> Tensor:
    """One vector (B, D) of the maps (B, C, H, W) of an image at each scale: the mean over scales.

    Args:
        maps: one tensor a scale; of equal shape unless ``kind`` is gem.
        kind: "gem", or "" for the maps themselves, as vectors.
        power: of gem.
        normalize: to unit length, with 1e-6 added to the norm.
    """
    if kind == "gem":
        rows = torch.stack([generalized_mean(of_scale, power) for of_scale in maps]).mean(dim=0)
    else:
        rows = torch.stack([of_scale.flatten(1) for of_scale in maps]).mean(dim=0)
    return unit_vectors(rows, 1e-6) if normalize else rows


@dataclass(frozen=True)
class Whitening:
    """Principal components of unit variance.

    Attributes:
        mean: (F,).
        components: (F, D).
    """

    mean: Tensor
    components: Tensor

    @classmethod
    def of(cls, rows: Tensor, num_components: int) -> Whitening:
        """Of rows (N, F), in float64; as in VISSL by the sum of squares, not their mean.

        Args:
            rows: N features.
            num_components: D at most; those of largest variance. -1: F.
        """
        mean = rows.double().mean(dim=0)
        centred = rows.double() - mean
        return cls._of_squares(mean, centred.T @ centred, num_components)

    @classmethod
    def of_all_ranks(cls, own_rows: Tensor, num_components: int) -> Whitening:
        """The same of the rows of all ranks, of which each may have another number. Collective.

        Cost: two all-reduces, of F and of F * F numbers.
        """
        count = all_reduce_sum(torch.tensor([len(own_rows)], dtype=torch.float64, device=own_rows.device))
        mean = all_reduce_sum(own_rows.double().sum(dim=0)) / count
        centred = own_rows.double() - mean
        return cls._of_squares(mean, all_reduce_sum(centred.T @ centred), num_components)

    @classmethod
    def _of_squares(cls, mean: Tensor, squares: Tensor, num_components: int) -> Whitening:
        variances, vectors = torch.linalg.eigh(squares)
        variances = variances.clamp(min=float(variances.max()) * 1e-5)
        largest = variances.argsort(descending=True)[: num_components if num_components > 0 else None]
        return cls(mean, vectors[:, largest] / variances[largest].sqrt())

    def __call__(self, rows: Tensor) -> Tensor:
        return ((rows.double() - self.mean) @ self.components).to(rows.dtype)


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
