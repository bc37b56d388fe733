"""VICRegL: VICReg between views of an image, and between places of their maps (https://arxiv.org/abs/2210.01571).

Each place of one map is matched twice with a place of another map: the nearest in the image, and the one with the
nearest embedding. VICReg's criterion is applied to the matched pairs. Variance and covariance are computed over the
n-th pairs of all images of all ranks, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.feature_distillation import FeatureMaps
from vissl_zero.methods.gather import at_least_float32, sum_over_ranks
from vissl_zero.methods.method import Batch, EmbeddingMethod, output_of
from vissl_zero.methods.vicregl_keys import VICRegLHeadConfig, VICRegLLossConfig
from vissl_zero.registry import HEADS, LOSSES

_NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
_VARIANCE_EPS = 1e-4  # as VICReg


@HEADS.register("vicregl_head", config=VICRegLHeadConfig)
class VICRegLHead(nn.Module):
    """VICRegL's expanders: an MLP of features, and an MLP of each place of the last maps.

    Args: the fields of ``VICRegLHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], map_dims: Sequence[int], norm: str = "batch"):
        super().__init__()
        self.expander = _expander(dims, norm)
        self.map_expander = _expander((dims[0], *map_dims), norm)
        self._width = dims[0]

    def forward(self, features: Tensor, maps: list[Tensor]) -> FeatureMaps:
        """Expand features (b, F), and maps (b_r, F, h_r, w_r) of each resolution."""
        if features.shape[1] != self._width:
            must = f"must be a trunk whose features are as many as the channels of its maps, {self._width}"
            fix = "Take another trunk, such as resnet."
            raise ConfigError([Problem("config.MODEL.TRUNK.NAME", f"{features.shape[1]} features", must, fix)])
        rows = [crop_maps.movedim(1, 3) for crop_maps in maps]
        # One pass for all resolutions, so that batch norm has the statistics of all places, as of all features.
        expanded = self.map_expander(torch.cat([places.flatten(0, 2) for places in rows]))
        parts = expanded.split([places.shape[:3].numel() for places in rows])
        shown = [part.unflatten(0, places.shape[:3]).movedim(3, 1) for part, places in zip(parts, rows, strict=True)]
        return FeatureMaps(self.expander(features), shown)


def _expander(dims: Sequence[int], norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(dims[:-1]):
        layers += [nn.Linear(width_in, width_out), _NORMS[norm](width_out), nn.ReLU(inplace=True)]
    # Without bias: variance and covariance subtract the mean.
    return nn.Sequential(*layers, nn.Linear(dims[-2], dims[-1], bias=False))


def place_centers(boxes: Tensor, height: int, width: int) -> Tensor:
    """Compute the centers of a map's places in the image.

    Args:
        boxes: (n, 4) box of each crop: top, left, bottom, right. A mirrored crop has left > right.
        height, width: size of the map.
    Returns:
        (n, height * width, 2): row and column, in pixels of the image.
    """
    down, across = ((torch.arange(count, device=boxes.device) + 0.5) / count for count in (height, width))
    top, left, bottom, right = boxes[:, :, None].unbind(1)
    rows, columns = top + down * (bottom - top), left + across * (right - left)
    grid = torch.broadcast_tensors(rows[:, :, None], columns[:, None, :])
    return torch.stack(grid, dim=3).flatten(1, 2)


def match_places(
    places: Tensor, others: Tensor, distances: Tensor, num_matches: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pair each place of one map with the nearest place of another, and keep the pairs with the smallest distances.

    Args:
        places: (n, P, D) embeddings.
        others: (n, Q, D) embeddings of the other map.
        distances: (n, P, Q) distances that decide the match.
        num_matches: number of pairs to keep; None: all.
    Returns:
        Embeddings of both sides of the pairs, in the order of places, (n, M, D) each, M at most P.
    """
    nearest, partners = distances.min(dim=2)
    # Stable, because distances in the image are often equal, and every level must keep the same pairs.
    kept = nearest.argsort(dim=1, stable=True)[:, :num_matches].sort(dim=1).values
    return _rows_at(places, kept), _rows_at(others, partners.gather(1, kept))


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    return rows.take_along_dim(index[:, :, None], dim=1)


def spread_and_redundancy(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Compute VICReg's variance and covariance terms over the samples of all ranks. Collective.

    Args:
        embeddings: (n, K, D), K sets of embeddings of this rank's samples, with separate statistics.
    Returns:
        Two 0-d tensors, means over the sets, the same on every rank: how far the features' standard deviations fall
        short of 1, and the sum of squared covariances over D.
    Cost: two all-reduces, of K * D + 1 and K * D * D numbers, and as many in the backward pass.
    """
    count, dim = embeddings.shape[1:]
    sums = sum_over_ranks(torch.cat((embeddings.sum(dim=0).flatten(), embeddings.new_tensor([len(embeddings)]))))
    num_samples = sums[-1].detach()
    centered = embeddings - (sums[:-1] / num_samples).view(count, dim)
    by_set = centered.transpose(0, 1)
    # clamp: one sample has no variance.
    covariances = sum_over_ranks(by_set.transpose(1, 2) @ by_set) / (num_samples - 1).clamp(min=1)
    variances = covariances.diagonal(dim1=1, dim2=2)
    spread = F.relu(1 - torch.sqrt(variances + _VARIANCE_EPS)).mean()
    return spread, (covariances.square().sum() - variances.square().sum()) / (count * dim)


Weights = tuple[float, float, float]  # of distance, spread and redundancy


def global_loss(views: Tensor, weights: Weights) -> Tensor:
    """Apply VICReg to each of the first two views against all others. Collective.

    Args:
        views: (V, n, D) embeddings of this rank's samples.
        weights: weights of the three terms.
    Returns:
        0-d. The distance is the mean over this rank's samples and pairs; the other terms are the same on every rank.
    """
    pairs = [(views[first] - views[second]).square().sum() for first, second in pairs_of(len(views))]
    distance = torch.stack(pairs).mean() / max(views[0].numel(), 1)
    return _weighted(weights, distance, *spread_and_redundancy(views.transpose(0, 1)))


def local_loss(maps: Sequence[Tensor], boxes: Tensor, num_matches: Sequence[int], weights: Weights) -> Tensor:
    """Apply VICReg to places of the first two maps and their matches in all other maps. Collective.

    Args:
        maps: (n, D, h, w) of each crop, for this rank's samples.
        boxes: (V, n, 4) box of each crop.
        num_matches: number of matches by position to keep, for the first map of a pair and for the second.
        weights: weights of the three terms.
    Returns:
        0-d, as ``global_loss``.
    """
    places = [crop_map.flatten(2).transpose(1, 2) for crop_map in maps]
    centers = [place_centers(box, *crop_map.shape[2:]) for box, crop_map in zip(boxes, maps, strict=True)]
    terms = []
    for pair in pairs_of(len(maps)):
        for (one, other), num_kept in zip((pair, pair[::-1]), num_matches, strict=True):
            # Matching is a choice without gradient; the matched embeddings have one.
            with torch.no_grad():
                # Every place has a partner by embedding. By position only the closest pairs show the same part of the
                # image.
                by_embedding = torch.cdist(places[one], places[other])
                # Differences instead of cdist's matrix product, whose rounding would decide between equal distances.
                by_place = (centers[one][:, :, None] - centers[other][:, None]).square().sum(dim=3)
            for distances, limit in ((by_embedding, None), (by_place, num_kept)):
                matches = match_places(places[one], places[other], distances, limit)
                terms.append(_weighted(weights, *_terms_of_matches(*matches)))
    return torch.stack(terms).mean() * 2  # the mean over a pair's two directions, the sum of both kinds of matches


def _terms_of_matches(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return distance, spread and redundancy of matched embeddings (n, M, D). Collective."""
    distance = (first - second).square().sum() / max(first.numel(), 1)
    return distance, *spread_and_redundancy(torch.cat((first, second), dim=1))


def pairs_of(num_views: int) -> list[tuple[int, int]]:
    """List the pairs of views to compare: each of the first two views with all others."""
    return [(first, second) for first in range(2) for second in range(num_views) if second != first]


def _weighted(weights: Weights, *terms: Tensor) -> Tensor:
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()


@LOSSES.register("vicregl_loss", config=VICRegLLossConfig)
class VICRegL(EmbeddingMethod):
    """VICRegL: VICReg of two or more views, and of matching places of their maps.

    Args: the fields of ``VICRegLLossConfig``.
    """

    def __init__(
        self,
        sim_coeff: float = 25.0,
        std_coeff: float = 25.0,
        cov_coeff: float = 1.0,
        alpha: float = 0.75,
        num_matches: Sequence[int] = (20, 4),
    ):
        super().__init__()
        self.weights = sim_coeff, std_coeff, cov_coeff
        self.alpha = alpha
        self.num_matches = tuple(num_matches)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the weighted sum of ``global_loss`` and ``local_loss``. Collective.

        Raises:
            ConfigError: the transforms do not return the boxes of crops.
        """
        if batch.boxes is None:
            fix = "Write keeps_boxes: true in ImgPilToMultiCrop."
            raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", "", "must keep the boxes of crops", fix)])
        output = output_of(outputs, "maps")
        crops = sum(batch.num_crops), batch.num_local
        views = at_least_float32(output.embeddings).unflatten(0, crops)
        self._note(views[0])
        # The loss needs a map per crop. A head returns one tensor per crop size, even with views_apart.
        counts = batch.num_crops if len(output.maps) > 1 else [sum(batch.num_crops)]
        maps = [
            crop_map
            for maps_of_size, count in zip(output.maps, counts, strict=True)
            for crop_map in at_least_float32(maps_of_size).unflatten(0, (count, batch.num_local))
        ]
        local = local_loss(maps, batch.boxes.unflatten(0, crops), self.num_matches, self.weights)
        return self.alpha * global_loss(views, self.weights) + (1 - self.alpha) * local
