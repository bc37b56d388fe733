"""k-nearest-neighbor classification of features: the quality of a trunk, measured without training a head.

Source: the weighted vote of https://arxiv.org/abs/1805.01978, as DINO and VISSL use it.

A run is evaluated before the first step, every k epochs if configured, and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vissl_zero.collectives import all_gather_rows, rank, world_size
from vissl_zero.data.loader import eval_images, rank_slice
from vissl_zero.data.source import Source, Subset, build_eval_sources
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.evaluation.features import (
    Features,
    extract_features,
    layers_of,
    lidar,
    nearest,
    rankme,
    view_features,
)
from vissl_zero.evaluation.pictures import Neighbors, PatchPictures, find_neighbors, middles, patch_pictures
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.terminal import print_line


def vote(similarities: Tensor, labels: Tensor, sigma: float, num_classes: int) -> Tensor:
    """Return the class with the largest sum of ``exp(similarity / sigma)``; of equal ones, the lowest.

    Args:
        similarities: similarities (Q, k) of the neighbors.
        labels: classes (Q, k) int64 of the neighbors.
        sigma: temperature; a smaller one gives near neighbors more weight.
        num_classes: number of classes, which are 0 to num_classes - 1.
    Returns:
        A class for each query, (Q,) int64.
    """
    # Relative to the nearest neighbor: this changes sums by a common factor, and avoids overflow at a small sigma.
    weights = ((similarities - similarities.amax(dim=1, keepdim=True)) / sigma).exp()
    sums = weights.new_zeros(len(labels), num_classes).scatter_add_(1, labels, weights)
    is_largest = sums == sums.amax(dim=1, keepdim=True)
    return is_largest.int().argmax(dim=1)


def knn_top1(
    queries: Features,
    index: Features,
    num_neighbors: int = 20,
    sigma: float = 0.07,
    is_cosine: bool = True,
    excluded: Tensor | None = None,
) -> float | None:
    """Compute ``knn_top1s`` for one number of neighbors and one temperature. Collective."""
    top1s = knn_top1s(queries, index, [(num_neighbors, sigma)], is_cosine, excluded)
    return None if top1s is None else top1s[0]


def knn_top1s(
    queries: Features,
    index: Features,
    votes: Sequence[tuple[int, float]],
    is_cosine: bool = True,
    excluded: Tensor | None = None,
) -> list[float] | None:
    """Compute the share of queries whose neighbors vote for their class. Collective: ranks share the queries.

    All arguments must be equal on every rank.

    Args:
        queries: features of Q images.
        index: features of N images.
        votes: number of neighbors and temperature of each vote.
        is_cosine: whether to compare by cosine similarity; else by dot product.
        excluded: see ``nearest``.
    Returns:
        Top-1 from 0 to 1 for each vote, equal on every rank; None if queries or index have no labels.
    Cost: Q * N * F / ranks multiplications, and an all-gather for each vote.
    """
    if queries.labels is None or index.labels is None:
        return None
    local_slice = rank_slice(len(queries.rows), rank(), world_size())
    without = None if excluded is None else excluded[local_slice]
    # Once, for the largest k: neighbors come nearest first, so every smaller k is a prefix.
    similarities, places = nearest(queries.rows[local_slice], index.rows, max(k for k, _ in votes), is_cosine, without)
    num_classes = int(max(index.labels.max(), queries.labels.max())) + 1
    shares = []
    for k, sigma in votes:
        predicted = all_gather_rows(vote(similarities[:, :k], index.labels[places[:, :k]], sigma, num_classes))
        shares.append(float((predicted == queries.labels).double().mean()))
    return shares


@dataclass(frozen=True)
class Measured:
    """The features of one evaluation.

    Attributes:
        index: features of TRAIN's images.
        queries: features of TEST's images, or of some of TRAIN's.
        excluded: row of each query in the index, if queries are images of TRAIN; else None.
    """

    index: Features
    queries: Features
    excluded: Tensor | None


_FALLEN = 0.5  # a fall below this share of the first RankMe is reported; other images change RankMe far less


def fall_of_rank(results: Mapping[str, Any]) -> str:
    """Return a sentence if features use far fewer dimensions than at the start (``rankme_before``); else ""."""
    before, after = results.get("rankme_before"), results.get("rankme_after")
    if before is None or after is None or after >= _FALLEN * before:
        return ""
    return (
        f"RankMe fell from {before:.1f} to {after:.1f}: the features use far fewer dimensions than those of the "
        "weights that this run continued from. Continue with smaller steps (config.OPTIMIZER.param_schedulers.lr) or "
        "for fewer epochs, and compare with vissl-zero evaluate."
    )


class KnnHook(Hook):
    """Classifies TEST's images by their neighbors among TRAIN's images, by features and by raw pixels.

    Without TEST, images of TRAIN are classified by the others. Adds ``knn_top1_before``, ``knn_top1_after`` and
    ``knn_top1_raw_pixels`` (0 to 1; None without labels) to the run's results, and, with
    NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS, ``knn_top1_latest`` while it trains and ``knn_top1_by_step`` ([step, top-1] each)
    at the end. Neighbors are found without labels too.

    ``rankme_before`` and ``rankme_after`` are RankMe of the features of TRAIN's images; ``lidar`` is LiDAR of views
    that training makes, at the end (LIDAR_IMAGES); ``knn_top1_by_vote`` is top-1 at the end by "k=20 T=0.07"
    (ALSO_TOPK, ALSO_SIGMA). The best of several inner layers (EXTRACT_TRUNK_FEATURES_ONLY with a map) counts;
    ``knn_top1_by_layer`` has them all.

    Attributes:
        curve: (optimizer steps done, top-1) of every measurement.
        neighbors_before, neighbors_after: images and neighbors to draw; None until measured, and with USE_KNN off.
        pictures: pictures of the same images' patches at the end; only for vision transformers.
    """

    def __init__(self, plan: ResolvedRun):
        self._options = plan.config.NEAREST_NEIGHBOR
        self._index_source: Source | None = None
        self._query_source: Source | None = None
        self._own_places: list[int] | None = None
        self.curve: list[tuple[int, float]] = []
        self.neighbors_before: Neighbors | None = None
        self.neighbors_after: Neighbors | None = None
        self.pictures: list[PatchPictures] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the curve so far."""
        return {"curve": [list(point) for point in self.curve]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.curve = [(int(step), float(top1)) for step, top1 in state["curve"]]

    def on_start(self, run: Run) -> None:
        if not self._options.USE_KNN:
            return
        self._open_sources(run)
        if run.is_resumed:
            # The measurement before training is in the results of the checkpoint.
            return
        measured = self._measure(run, with_pixels=True)
        run.results["knn_top1_before"] = self._record(run, measured)
        run.results["knn_top1_after"] = None
        pixels = Measured(measured.index.of_pixels(), measured.queries.of_pixels(), measured.excluded)
        run.results["knn_top1_raw_pixels"] = self._top1(pixels)
        run.results["rankme_before"] = rankme(measured.index.rows)
        self.neighbors_before = self._neighbors(measured)

    def on_epoch_end(self, run: Run) -> None:
        # The features of a frozen trunk stay as they are.
        is_frozen = run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY
        if self._index_source is not None and not is_frozen and run.is_due(self._options.EVERY_NUM_EPOCHS):
            run.results["knn_top1_latest"] = self._record(run, self._measure(run))

    def on_end(self, run: Run) -> None:
        if self._index_source is None:
            return
        if run.num_steps == 0 or run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY:
            # The features have not changed, so they need not be measured again.
            run.results["knn_top1_after"] = run.results["knn_top1_before"]
            self.neighbors_after = self.neighbors_before
            if "rankme_before" in run.results:
                run.results["rankme_after"] = run.results["rankme_before"]
            if self._options.ALSO_TOPK or self._options.ALSO_SIGMA or self._options.LIDAR_IMAGES:
                self._look_closer(run, self._measure(run))
            self._take_pictures(run)
            return
        measured = self._measure(run)
        run.results["knn_top1_after"] = self._record(run, measured)
        run.results["rankme_after"] = rankme(measured.index.rows)
        if run.is_main and run.plan.config.MODEL.WEIGHTS_INIT.CONTINUE and (warning := fall_of_rank(run.results)):
            print_line(warning)
        self._look_closer(run, measured)
        self.neighbors_after = self._neighbors(measured)
        self._take_pictures(run)
        if run.results.pop("knn_top1_latest", None) is not None:
            run.results["knn_top1_by_step"] = [list(point) for point in self.curve]

    def _look_closer(self, run: Run, measured: Measured) -> None:
        """Measure the optional metrics at the end of a run. Collective."""
        options = self._options
        votes = [
            (k, sigma)
            for k in dict.fromkeys([options.TOPK, *options.ALSO_TOPK])
            for sigma in dict.fromkeys([options.SIGMA, *options.ALSO_SIGMA])
        ]
        if len(votes) > 1:
            shares = knn_top1s(measured.queries, measured.index, votes, options.L2_NORM_FEATS, measured.excluded)
            if shares is not None:
                named = zip(votes, shares, strict=True)
                run.results["knn_top1_by_vote"] = {f"k={k} T={sigma:g}": share for (k, sigma), share in named}
        if options.LIDAR_IMAGES:
            assert self._index_source is not None
            images = thinned(self._index_source, options.LIDAR_IMAGES)
            run.results["lidar"] = lidar(view_features(run, images, options.LIDAR_VIEWS))

    def _take_pictures(self, run: Run) -> None:
        """Draw the patches of the images whose neighbors are shown. Collective."""
        if self.neighbors_after is not None:
            shown = self.neighbors_after
            self.pictures = patch_pictures(run, shown.query_source, shown.query_ids)

    def _open_sources(self, run: Run) -> None:
        train, test = build_eval_sources(run.plan.config.DATA, run.plan.seed)
        max_train, max_test = self._options.MAX_TRAIN_IMAGES, self._options.MAX_TEST_IMAGES
        self._index_source = thinned(train, max_train)
        if test is not None:
            self._query_source = thinned(test, max_test)
        else:
            self._own_places = middles(len(self._index_source), max_test)
            self._query_source = Subset(self._index_source, tuple(self._own_places))

    def _measure(self, run: Run, with_pixels: bool = False) -> Measured:
        """Extract the features of the current weights. Collective."""
        assert self._index_source is not None
        assert self._query_source is not None
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        data_cfg, seed = run.plan.config.DATA, run.plan.seed
        # Images are opened for each evaluation, so that loader workers end with it.
        index = extract_features(run, eval_images(self._index_source, data_cfg, seed), with_pixels)
        if self._own_places is not None:
            own_places = torch.tensor(self._own_places, device=index.rows.device)
            return self._of_best_layer(run, Measured(index, index.at(own_places), own_places))
        queries = extract_features(run, eval_images(self._query_source, data_cfg, seed), with_pixels)
        return self._of_best_layer(run, Measured(index, queries, None))

    def _of_best_layer(self, run: Run, measured: Measured) -> Measured:
        """Return the features of the best inner layer only."""
        by_layer = {
            name: Measured(
                measured.index.of_columns(layer_features),
                measured.queries.of_columns(layer_features),
                measured.excluded,
            )
            for name, layer_features in layers_of(run).items()
        }
        if not by_layer:
            return measured
        shares = {name: self._top1(layer_features) for name, layer_features in by_layer.items()}
        run.results["knn_top1_by_layer"] = shares
        return by_layer[max(shares, key=lambda name: shares[name] or 0.0)]

    def _record(self, run: Run, measured: Measured) -> float | None:
        top1 = self._top1(measured)
        # A run that resumes at its end measures the last step again.
        if top1 is not None and (not self.curve or self.curve[-1][0] < run.step):
            self.curve.append((run.step, top1))
        return top1

    def _top1(self, measured: Measured) -> float | None:
        k, sigma, is_cosine = self._options.TOPK, self._options.SIGMA, self._options.L2_NORM_FEATS
        return knn_top1(measured.queries, measured.index, k, sigma, is_cosine, measured.excluded)

    def _neighbors(self, measured: Measured) -> Neighbors:
        assert self._index_source is not None
        assert self._query_source is not None
        is_cosine = self._options.L2_NORM_FEATS
        return find_neighbors(
            self._query_source, self._index_source, measured.queries, measured.index, is_cosine, measured.excluded
        )


def thinned(source: Source, max_images: int) -> Source:
    """Select at most ``max_images`` images of a source, evenly spaced."""
    return source if len(source) <= max_images else Subset(source, tuple(middles(len(source), max_images)))
