"""Images labeled by k-means of their features: VISSL's ``cluster_features_and_label``, the first half of ClusterFit.

And the nearest prototype of a trained head: VISSL's engine ``extract_cluster``.

Source: https://arxiv.org/abs/1912.03330; VISSL's ``tools/cluster_features_and_label.py`` at 09270ed2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vissl_zero.collectives import all_gather_objects, all_gather_rows, all_reduce_sum, rank, world_size
from vissl_zero.config.blocks.output import ClusterFit
from vissl_zero.data.loader import eval_images, rank_slice
from vissl_zero.data.source import Source, build_eval_sources, splits_to_read
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import ConfigError, DataError, Problem
from vissl_zero.evaluation.features import (
    evaluating,
    extract_features,
    layers_of,
    num_not_finite,
    own_batches,
    require_finite,
    rows_to_write,
)
from vissl_zero.evaluation.retrieval import Whitening
from vissl_zero.registry import HOOKS
from vissl_zero.terminal import print_line

ASSIGNMENTS = "cluster_assignments"  # folder in the run folder
_CHUNK_ELEMENTS = 2**24  # distances at once: 64 MiB in float32


def unit_rows(rows: Tensor) -> Tensor:
    """Divide rows by their L2 norm plus 1e-5, as VISSL does."""
    return rows / (rows.norm(dim=1, keepdim=True) + 1e-5)


def nearest_centroids(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest of ``centroids`` (K, F) for each of ``rows`` (N, F). Collective: ranks share the rows.

    Returns:
        Indices of centroids (N,) int64, and squared distances (N,); equal on every rank.
    """
    local_rows = rows[rank_slice(len(rows), rank(), world_size())]
    squares = centroids.square().sum(dim=1)
    labels, distances = [rows.new_zeros(0, dtype=torch.int64)], [rows.new_zeros(0)]
    for part in local_rows.split(max(1, _CHUNK_ELEMENTS // len(centroids))):
        # The squared distance without the row's own square, which does not affect the order: this takes a matrix
        # product instead of differences.
        nearest = (squares - 2 * part @ centroids.T).min(dim=1)
        labels.append(nearest.indices)
        distances.append((nearest.values + part.square().sum(dim=1)).clamp(min=0))
    return all_gather_rows(torch.cat(labels)), all_gather_rows(torch.cat(distances))


def _require_images(options: ClusterFit, num_images: int) -> None:
    limit = num_images if options.DATA_LIMIT < 0 else min(options.DATA_LIMIT, num_images)
    if limit < options.NUM_CLUSTERS:
        raise DataError(
            f"CLUSTERFIT.NUM_CLUSTERS: {options.NUM_CLUSTERS} clusters need as many images, and {limit} of "
            f"{options.FEATURES.DATA_PARTITION} are clustered. Lower it."
        )


def kmeans(rows: Tensor, num_clusters: int, num_iterations: int, seed: int) -> Tensor:
    """Compute centroids (K, F) by Lloyd's algorithm, which ends early if no assignment changes. Collective.

    The first centroids are rows drawn by ``seed``. An empty cluster moves to the row farthest from its centroid.

    Args:
        rows: rows (N, F), equal on every rank; N is at least K.
        num_clusters: number of clusters, K.
        num_iterations: most iterations.
        seed: seed of the draw.
    Cost: N * K * F / ranks multiplications and an all-reduce of K * F numbers an iteration.
    """
    # Drawn on the CPU: the same seed gives other numbers on a GPU.
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centroids, before = rows[drawn.to(rows.device)].clone(), None
    local_slice = rank_slice(len(rows), rank(), world_size())
    for _ in range(num_iterations):
        labels, distances = nearest_centroids(rows, centroids)
        if before is not None and torch.equal(labels, before):
            break
        before = labels
        # In float64, so that the order of the sum, which follows from the number of ranks, hardly ever moves an image.
        sums = torch.zeros(num_clusters, rows.shape[1], dtype=torch.float64, device=rows.device)
        sums = all_reduce_sum(sums.index_add_(0, labels[local_slice], rows[local_slice].double()))
        counts = torch.bincount(labels, minlength=num_clusters)
        centroids = (sums / counts.clamp(min=1)[:, None]).to(rows.dtype)
        empty = (counts == 0).nonzero()[:, 0]
        # An empty cluster would stay empty: its centroid is nearest to no row.
        centroids[empty] = rows[distances.topk(len(empty)).indices]
    return centroids


@HOOKS.register("cluster_features_and_label")
class ClusterFeatures(Hook):
    """Clusters the features of a split, and writes lists of images of both splits with their clusters as labels.

    ``CLUSTERFIT`` has the keys. Files, under VISSL's names: ``<name>_<split>_<layer>_N<clusters>_D<width>_images.npy``
    and ``..._labels.npy``, which ``disk_filelist`` reads, and ``....safetensors`` in place of VISSL's pickle
    (``hard_labels``, ``distances``, ``centroids``). Adds ``clusters`` to the results: split -> the two lists.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def on_start(self, run: Run) -> None:
        options = run.plan.config.CLUSTERFIT
        train, test = build_eval_sources(run.plan.config.DATA, run.plan.seed)
        there = {"TRAIN": train, "TEST": test}
        wanted = dict.fromkeys([options.FEATURES.DATA_PARTITION, options.FEATURES.TEST_PARTITION])
        self._sources = {split: source for split in wanted if (source := there.get(split)) is not None}
        split = options.FEATURES.DATA_PARTITION
        if split not in self._sources:
            raise DataError(f"CLUSTERFIT.FEATURES.DATA_PARTITION: {split} names no images. Write TRAIN.")
        for source in self._sources.values():
            if not Path(source.name(0)).is_file():
                raise DataError(
                    f"CLUSTERFIT writes lists of image files, and {source.name(0)} is none. Take images of a "
                    "disk_folder or disk_filelist."
                )
        _require_images(options, len(self._sources[split]))

    def on_end(self, run: Run) -> None:
        options, seed = run.plan.config.CLUSTERFIT, run.plan.seed
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        rows, images = {}, {}
        for split, source in self._sources.items():
            extracted = extract_features(run, eval_images(source, run.plan.config.DATA, seed))
            # The cluster of a broken image would be that of the image in its place.
            images[split] = sorted({*range(len(source))}.difference(extracted.broken))
            kept = extracted.without_broken().rows
            require_finite(run, num_not_finite(kept), len(kept))
            columns = layers_of(run).get(options.FEATURES.LAYER_NAME, slice(None))
            rows[split] = unit_rows(kept[:, columns])
        first = rows[options.FEATURES.DATA_PARTITION]
        _require_images(options, len(first))  # again: broken ones are left out
        if options.DATA_LIMIT >= 0:
            generator = torch.Generator().manual_seed(options.DATA_LIMIT_SAMPLING.SEED)
            first = first[torch.randperm(len(first), generator=generator)[: options.DATA_LIMIT].to(first.device)]
        if (width := options.FEATURES.DIMENSIONALITY_REDUCTION) > 0:
            whitening = Whitening.of(first, width)
            first, rows = whitening(first), {split: whitening(features) for split, features in rows.items()}
        centroids = kmeans(first, options.NUM_CLUSTERS, options.NUM_ITER, seed)
        for split, features in rows.items():
            labels, distances = nearest_centroids(features, centroids)
            files = self._write(run, split, images[split], labels.cpu(), distances.cpu(), centroids.cpu())
            run.results.setdefault("clusters", {})[split] = files
            if run.is_main:
                used = len(labels.unique())
                line = f"{split}: {len(labels):,} images in {used:,} of {len(centroids):,} clusters: {files[0]}"
                print_line(line)

    def _write(
        self, run: Run, split: str, images: list[int], labels: Tensor, distances: Tensor, centroids: Tensor
    ) -> list[str]:
        """Write the files and the labels of ``images``, indices in the split, on rank 0; return both paths."""
        options = run.plan.config.CLUSTERFIT
        name = options.FEATURES.DATASET_NAME or "clusters"
        layer = options.FEATURES.LAYER_NAME or "features"
        folder = run.folder / options.OUTPUT_DIR
        prefix = f"{name}_{split.lower()}_{layer}_N{len(centroids)}_D{centroids.shape[1]}"
        files = [folder / f"{prefix}_{kind}.npy" for kind in ("images", "labels")]
        if run.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            source = self._sources[split]
            # Absolute, because the list is used from another folder.
            np.save(files[0], np.array([str(Path(source.name(index)).absolute()) for index in images]))
            np.save(files[1], labels.numpy())
            tensors = {"hard_labels": labels, "distances": distances, "centroids": centroids}
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{prefix}.safetensors")
        return [str(file) for file in files]


@HOOKS.register("extract_cluster")
class ExtractClusters(Hook):
    """Writes the best-scoring prototype of a SwAV head for every image of TRAIN and TEST at the end of a run.

    ``cluster_assignments/<split>_images.npy`` and ``..._labels.npy`` in the run folder, in the order of the images,
    which ``disk_filelist`` reads: the lists that VISSL's ``cluster_assignments_to_dataset.py`` makes. The first
    of several layers of prototypes counts. Adds ``clusters`` to the results: split -> the two lists.
    """

    def on_end(self, run: Run) -> None:
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; scores must not
        for split, source in splits_to_read(run.plan.config.DATA, run.plan.seed).items():
            self._assign(run, split, source)

    def _assign(self, run: Run, split: str, source: Source) -> None:
        """Assign each image of a split to its cluster. Collective."""
        ids, labels, num_clusters, num_wrong = [], [], 0, 0
        images = eval_images(source, run.plan.config.DATA, run.plan.seed)
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            for batch, num_own in own_batches(run, images):
                scores = getattr(run.sharded.model(batch.images)[0], "scores", None)
                if not scores:
                    must, fix = "must begin with a swav_head that has prototypes", "Name such a head and its weights."
                    raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", "another head", must, fix)])
                kept = rows_to_write(batch, num_own)
                ids.append(batch.sample_ids[kept])
                labels.append(scores[0][kept].argmax(dim=1))
                num_wrong += num_not_finite(scores[0][kept])
                num_clusters = scores[0].shape[1]
        places = all_gather_rows(torch.cat(ids))
        order = places.argsort()
        require_finite(run, sum(all_gather_objects(num_wrong)), len(order), "scores")
        assigned, inds = all_gather_rows(torch.cat(labels))[order].cpu(), places[order].tolist()
        folder = run.folder / ASSIGNMENTS
        files = [folder / f"{split.lower()}_{kind}.npy" for kind in ("images", "labels")]
        run.results.setdefault("clusters", {})[split] = [str(file) for file in files]
        if run.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            np.save(files[0], np.array([source.name(index) for index in inds]))
            np.save(files[1], assigned.numpy())
            used = len(assigned.unique())
            print_line(f"{split}: {len(assigned):,} images in {used:,} of {num_clusters:,} clusters: {files[0]}")
