"""kNN evaluation of a run: before the first step, every k epochs if asked, and at the end."""

from __future__ import annotations

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.data.eval_images import eval_images
from vissl_zero.data.source import Source, Subset, build_eval_sources
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.evaluation.features import Features, extract_features
from vissl_zero.evaluation.knn import knn_top1
from vissl_zero.evaluation.neighbours import Neighbours, find_neighbours


class KnnHook(Hook):
    """Classifies TEST's images by their neighbours among TRAIN's, in the trunk's features and in raw pixels.

    Adds ``knn_top1_before``, ``knn_top1_after`` and ``knn_top1_raw_pixels`` (0 to 1) to the run's results, and, with
    NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS, ``knn_top1_latest`` while it trains and ``knn_top1_by_step`` ([step, top-1] each)
    at the end. They are None where TRAIN or TEST has no labels, or TEST no images; neighbours are found all the same
    (of TRAIN's images if TEST has none).

    Attributes:
        curve: (optimizer steps done, top-1) of every measurement.
        neighbours_before, neighbours_after: images to look at; None until measured, and with USE_KNN off.
    """

    def __init__(self, plan: ResolvedRun):
        self._options = plan.config["NEAREST_NEIGHBOR"]
        self._index_source: Source | None = None
        self._query_source: Source | None = None
        self.curve: list[tuple[int, float]] = []
        self.neighbours_before: Neighbours | None = None
        self.neighbours_after: Neighbours | None = None

    def on_start(self, run: Run) -> None:
        if not self._options["USE_KNN"]:
            return
        train, test = build_eval_sources(run.plan.config["DATA"], run.plan.seed)
        self._index_source = thinned(train, self._options["MAX_TRAIN_IMAGES"])
        self._query_source = None if test is None else thinned(test, self._options["MAX_TEST_IMAGES"])
        index, queries = self._features(run, with_pixels=True)
        run.results["knn_top1_before"] = self._measure(run, index, queries)
        run.results["knn_top1_after"] = None
        run.results["knn_top1_raw_pixels"] = self._top1(index.of_pixels(), queries and queries.of_pixels())
        self.neighbours_before = self._neighbours(index, queries)

    def on_epoch_end(self, run: Run) -> None:
        every = self._options["EVERY_NUM_EPOCHS"]
        is_due = every > 0 and (run.epoch + 1) % every == 0 and run.step < run.num_steps  # on_end measures the last
        if self._index_source is not None and is_due:
            run.results["knn_top1_latest"] = self._measure(run, *self._features(run))

    def on_end(self, run: Run) -> None:
        if self._index_source is None:
            return
        index, queries = self._features(run)
        run.results["knn_top1_after"] = self._measure(run, index, queries)
        self.neighbours_after = self._neighbours(index, queries)
        if run.results.pop("knn_top1_latest", None) is not None:
            run.results["knn_top1_by_step"] = [list(point) for point in self.curve]

    def _features(self, run: Run, with_pixels: bool = False) -> tuple[Features, Features | None]:
        """Features of TRAIN's and of TEST's images. Collective."""
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        data_cfg, found = run.plan.config["DATA"], []
        for source in (self._index_source, self._query_source):
            if source is not None:
                # Made anew each time: its loader workers then live only as long as the evaluation.
                found.append(extract_features(run, eval_images(source, data_cfg, run.plan.seed), with_pixels))
        return found[0], found[1] if len(found) > 1 else None

    def _measure(self, run: Run, index: Features, queries: Features | None) -> float | None:
        top1 = self._top1(index, queries)
        if top1 is not None:
            self.curve.append((run.step, top1))
        return top1

    def _top1(self, index: Features, queries: Features | None) -> float | None:
        if queries is None or queries.labels is None or index.labels is None:
            return None
        k, sigma, is_cosine = (self._options[key] for key in ("TOPK", "SIGMA", "L2_NORM_FEATS"))
        return knn_top1(queries.rows, queries.labels, index.rows, index.labels, k, sigma, is_cosine)

    def _neighbours(self, index: Features, queries: Features | None) -> Neighbours:
        assert self._index_source is not None
        is_cosine = self._options["L2_NORM_FEATS"]
        if queries is None or self._query_source is None:
            return find_neighbours(self._index_source, self._index_source, index, index, is_cosine)
        return find_neighbours(self._query_source, self._index_source, queries, index, is_cosine)


def thinned(source: Source, max_images: int) -> Source:
    """At most ``max_images`` of a source, evenly spread over it; all of them if that is less than 1."""
    if max_images < 1 or len(source) <= max_images:
        return source
    return Subset(source, tuple(i * len(source) // max_images for i in range(max_images)))
