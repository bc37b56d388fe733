"""Extraction of features: a sharded model runs over images without training, and rows are in the order of the images.

RankMe and LiDAR measure how many dimensions features use, and so the quality of a trunk without labels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.collectives import all_gather_objects, all_gather_rows
from vissl_zero.config.components.heads import layer_names
from vissl_zero.data.dataset import ImageBatch, MicroBatchDataset
from vissl_zero.data.loader import EvalImages, rank_slice, sequential
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.data.source import Source
from vissl_zero.data.split_pipeline import build_split_pipeline
from vissl_zero.data.workers import BatchStream
from vissl_zero.engine.hook import Run
from vissl_zero.errors import DataError
from vissl_zero.terminal import print_line


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set ``model`` to evaluation mode, without gradients; restore the mode of every module afterward. A context.

    The mode is restored module by module, so that batch norms which a recipe keeps in evaluation mode stay in it.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: sharded parameters are gathered into views
            yield
    finally:
        for module, training in was_training:
            module.training = training


@contextmanager
def evaluated(run: Run) -> Iterator[nn.Module]:
    """Yield the model that ``EVALUATED_MODEL`` names, with the weights to evaluate, in evaluation mode. Collective.

    All ranks must call the model equally often. This averages the teacher's running statistics over ranks. If ranks
    may differ, call ``consolidate_buffers`` before for the student's.

    Cost: with a schedule-free optimizer, a copy of this rank's trained shards of the student.
    """
    if run.plan.config.EVALUATED_MODEL == "teacher":
        run.sharded.whole_teacher_tensors()  # makes its buffers equal on all ranks; gathers nothing that is not read
        with evaluating(run.sharded.teacher):
            yield run.sharded.teacher
    else:
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            yield run.sharded.model


_SECONDS_BETWEEN_LINES = 5.0


def own_batches(run: Run, images: EvalImages) -> Iterator[tuple[ImageBatch, int]]:
    """Yield this rank's batches on its device, each with the number of samples that belong to this rank.

    Rank 0 prints its progress every few seconds, because nothing else is shown during that time.

    Call the model on every batch, so that all ranks call it equally often. A rank without a sample gets a copy, for
    which the number is 0.
    """
    dtype = getattr(torch, run.plan.sharding.precision.master)
    began, last_progress, num_done = time.monotonic(), time.monotonic(), 0
    for batch in images.batches(run.plan.batch_per_rank * run.world_size, run.rank, run.world_size):
        local_slice = rank_slice(batch.num_global, run.rank, run.world_size)
        yield batch.to(run.device, dtype), local_slice.stop - local_slice.start
        num_done, now = num_done + batch.num_global, time.monotonic()
        if run.is_main and now - last_progress >= _SECONDS_BETWEEN_LINES and num_done < len(images):
            last_progress = now
            text = f"evaluating: {num_done:,} of {len(images):,} images, {num_done / (now - began):.0f} images/s"
            print_line(text)


def rows_to_write(batch: ImageBatch, num_own: int) -> list[int]:
    """List the rows of a batch of ``own_batches`` that belong to this rank, without rows of broken images."""
    return [place for place in range(num_own) if place not in batch.stand_ins]


def broken_ids(batch: ImageBatch, num_own: int) -> list[int]:
    """List the indices, in the source, of this rank's broken images in a batch of ``own_batches``."""
    return [int(batch.sample_ids[place]) for place in batch.stand_ins if place < num_own]


# Raw pixels are compared as thumbnails: larger images would take much memory, and their background would dominate.
_THUMBNAIL_SIDE = 16


@dataclass(frozen=True)
class Features:
    """Features of the images of a source, in its order, equal on every rank.

    Attributes:
        rows: features (N, F) of the trunk, float32 or float64.
        labels: labels (N,) int64; None without labels.
        pixels: thumbnails (N, 3 * h * w) of the images, from 0 to 1, at most ``_THUMBNAIL_SIDE`` pixels a side; None if
            they were not requested.
        broken: ascending indices of broken images; their rows have the features of other images.
    """

    rows: Tensor
    labels: Tensor | None
    pixels: Tensor | None = None
    broken: tuple[int, ...] = ()

    def at(self, places: Tensor) -> Features:
        """Return the features of the images at ``places``."""
        labels, pixels = (None if t is None else t[places] for t in (self.labels, self.pixels))
        return Features(self.rows[places], labels, pixels)

    def without_broken(self) -> Features:
        """Return the features without the rows of broken images."""
        kept = torch.ones(len(self.rows), dtype=torch.bool, device=self.rows.device)
        kept[list(self.broken)] = False
        return self.at(kept)

    def of_pixels(self) -> Features:
        """Return the same images with their pixels as features."""
        assert self.pixels is not None, "extract_features was not asked for pixels"
        return Features(self.pixels, self.labels)

    def of_columns(self, columns: slice) -> Features:
        """Return the same images with only ``columns`` of their features."""
        return Features(self.rows[:, columns], self.labels, self.pixels)


def layers_of(run: Run) -> dict[str, slice]:
    """Return the columns of each inner layer in the last extracted rows; empty if they are features of the trunk."""
    taps = getattr(run.evaluated_model, "feature_taps", None)
    if taps is None:
        return {}
    ends = list(accumulate(taps.widths))
    entries = run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP
    columns = (slice(end - width, end) for width, end in zip(taps.widths, ends, strict=True))
    return dict(zip(layer_names(entries), columns, strict=True))


def extract_features(run: Run, images: EvalImages, with_pixels: bool = False) -> Features:
    """Run the trunk (``EVALUATED_MODEL``) in evaluation mode over every image of ``images`` once. Collective.

    Cost: a forward pass over the images, shared among ranks; each rank then holds the features of all of them.
    """
    rows, pixels, ids, labels = [], [], [], []
    broken = list[int]()
    with evaluated(run) as model:
        for batch, num_own in own_batches(run, images):
            (features,) = model(batch.images, features_only=True)
            rows.append(features[:num_own].to(torch.promote_types(features.dtype, torch.float32)))
            # Without copies, so that each index occurs once and a sort restores the source's order.
            ids.append(batch.sample_ids[:num_own])
            targets = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
            labels.append(targets[:num_own])
            broken += broken_ids(batch, num_own)
            if with_pixels:
                pixels.append(thumbnails(batch.images[0][:num_own], images.transform))
    order = all_gather_rows(torch.cat(ids)).argsort()  # ids are indices of the source, 0 to N - 1, each once
    all_labels = all_gather_rows(torch.cat(labels))[order]
    return Features(
        rows=all_gather_rows(torch.cat(rows))[order],
        labels=None if bool((all_labels < 0).any()) else all_labels,
        pixels=all_gather_rows(torch.cat(pixels))[order] if with_pixels else None,
        broken=tuple(sorted(index for of_rank in all_gather_objects(broken) for index in of_rank)),
    )


def num_not_finite(rows: Tensor) -> int:
    """Count the rows (N, F) with a feature that is NaN or infinite."""
    return int((~rows.isfinite()).any(dim=1).sum())


def require_finite(run: Run, num_wrong: int, num_images: int, what: str = "features") -> None:
    """Raise DataError if ``what`` of ``num_wrong`` images, of all ranks, is NaN or infinite. Not collective."""
    if num_wrong:
        config = run.plan.config
        file = config.MODEL.WEIGHTS_INIT.PARAMS_FILE if config.TEST_ONLY else ""  # else the run has trained others
        weights = f"the weights {file}".rstrip()
        raise DataError(
            f"The {what} of {num_wrong} of {num_images} images are NaN or infinite: {weights} hold such values, or "
            "their numbers overflow. Take other weights, such as an earlier checkpoint."
        )


def thumbnails(images: Tensor, transform: Pipeline) -> Tensor:
    """Undo the normalization of images, and reduce them to thumbnails, one row each.

    Args:
        images: images (B, 3, H, W), as ``transform`` returns them.
        transform: pipeline whose Normalize, if it has one, is undone.
    Returns:
        Thumbnails (B, 3 * h * w), float32; h and w are at most ``_THUMBNAIL_SIDE``.
    """
    images = transform.unnormalized(images.float())
    height, width = (min(side, _THUMBNAIL_SIDE) for side in images.shape[2:])
    return F.adaptive_avg_pool2d(images, (height, width)).flatten(1)


_EPSILON = 1e-7  # added to each share, as both papers have it
_ROWS_PER_BLOCK = 4096
_RIDGE = 1e-4  # LiDAR's delta, added to the diagonal of the scatter within images


def rankme(rows: Tensor) -> float:
    """Compute RankMe, https://arxiv.org/abs/2210.02885, section 3: exp of the entropy of singular values' shares.

    Args:
        rows: features (N, F) of N images, not centered.
    Returns:
        A number from 1 to about F; NaN if a feature is not finite.
    Cost: 2 * N * F * F multiplications and the singular values of an F x F matrix. Not collective.
    """
    # Singular values are those of the triangle of a QR decomposition. By eigenvalues of rows.T @ rows, small singular
    # values would have the square root of the rounding error, and the result only seven correct digits.
    triangle = rows.new_zeros(0, rows.shape[1], dtype=torch.float64)
    for block in rows.split(_ROWS_PER_BLOCK):
        triangle = torch.linalg.qr(torch.cat([triangle, block.double()]), mode="r").R
    if not bool(torch.isfinite(triangle).all()):
        return math.nan
    return _smooth_rank(torch.linalg.svdvals(triangle))


def lidar(views: Tensor) -> float:
    """Compute LiDAR, https://arxiv.org/abs/2312.04000, section 4.

    It is the smooth rank of the matrix of linear discriminant analysis, with images as classes and augmented views as
    samples.

    Args:
        views: features (n, q, F) of q views of each of n images; n and q above 1.
    Returns:
        A number from 1 to about the smaller of F and n - 1; NaN if a feature is not finite.
    Cost: (n * q + n) * F * F multiplications and two sets of eigenvalues of an F x F matrix. Not collective.
    """
    wide = views.double()
    if not bool(torch.isfinite(wide).all()):
        return math.nan
    means = wide.mean(dim=1)
    between = (means - means.mean(dim=0)).T @ (means - means.mean(dim=0)) / (len(means) - 1)
    rest = (wide - means[:, None]).flatten(0, 1)
    within = rest.T @ rest / (len(means) * (wide.shape[1] - 1))
    values, vectors = torch.linalg.eigh(within)
    whiten = vectors * (values.clamp(min=0) + _RIDGE).rsqrt() @ vectors.T
    matrix = whiten @ between @ whiten
    # Made symmetric again: rounding of the products leaves differences, and eigvalsh reads one triangle only.
    return _smooth_rank(torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp(min=0))


def _smooth_rank(values: Tensor) -> float:
    """Compute the exponential of the entropy of the shares of ``values`` (F,), which must not be negative."""
    shares = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny) + _EPSILON
    return math.exp(float(-(shares * shares.log()).sum()))


def view_features(run: Run, source: Source, num_views: int) -> Tensor:
    """Compute features (n, num_views, F) of training's own views of n images. Collective; equal on every rank.

    The views are the crops of the first size that the training transforms make of an image in epochs 0, 1 and so on, so
    they follow from the seed and the image alone.

    Args:
        run: run with a sharded model in any mode; see ``evaluated``.
        source: source of the n images.
        num_views: number of views of an image.
    Cost: n * num_views forward passes, shared among ranks; augmentations are drawn again.
    """
    data_cfg = run.plan.config.DATA
    pipeline = build_split_pipeline(data_cfg, "TRAIN")
    dataset = MicroBatchDataset(source, pipeline, run.plan.seed, skip_broken=data_cfg.ON_BROKEN_IMAGE == "skip")
    dtype = getattr(torch, run.plan.sharding.precision.master)
    total = run.plan.batch_per_rank * run.world_size
    passes, epoch = list[Tensor](), 0
    with evaluated(run) as model:
        while sum(view_rows.shape[1] for view_rows in passes) < num_views:
            rows, ids = [], []
            plans = (replace(plan, epoch=epoch) for plan in sequential(len(source), total, run.rank, run.world_size))
            for batch in BatchStream(dataset, data_cfg).load(plans):
                local_slice = rank_slice(batch.num_global, run.rank, run.world_size)
                num_own = local_slice.stop - local_slice.start  # 0 on a rank without samples, which got a copy
                moved = batch.to(run.device, dtype)
                (features,) = model(moved.images[:1], features_only=True)
                by_crop = features.unflatten(0, (batch.num_crops[0], -1)).transpose(0, 1)  # rows are crop-major
                rows.append(by_crop[:num_own].to(torch.promote_types(features.dtype, torch.float32)))
                ids.append(moved.sample_ids[:num_own])
            order = all_gather_rows(torch.cat(ids)).argsort()
            passes.append(all_gather_rows(torch.cat(rows))[order])
            epoch += 1
    return torch.cat(passes, dim=1)[:, :num_views]


def nearest(
    queries: Tensor, index: Tensor, num_neighbors: int, is_cosine: bool = True, excluded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the most similar rows of ``index`` for each query, most similar first; ties keep the order of the index.

    Args:
        queries: (Q, F) features.
        index: (N, F) features.
        num_neighbors: k; fewer are returned if the index has fewer.
        is_cosine: whether to compare by cosine similarity; else by dot product.
        excluded: row of the index that each query (Q,) must not find, which is the query itself; None: no row.
    Returns:
        Similarities (Q, k) float64, and rows of the index (Q, k) int64. Not collective.
    """
    if is_cosine:
        queries, index = F.normalize(queries), F.normalize(index)
    num_neighbors = min(num_neighbors, len(index) - (excluded is not None))
    places = torch.arange(len(index), device=index.device, dtype=torch.float64)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, len(index)))
    best = []
    for start in range(0, len(queries), chunk):
        similarities = (queries[start : start + chunk] @ index.T).double()
        keys = similarities - similarities.abs().amax(dim=1, keepdim=True) * _TIE_BREAK * places
        if excluded is not None:
            keys.scatter_(1, excluded[start : start + chunk, None], -torch.inf)
        chosen = keys.topk(num_neighbors, dim=1).indices
        best.append((similarities.gather(1, chosen), chosen))
    if not best:
        return places.new_zeros(0, num_neighbors), places.new_zeros(0, num_neighbors, dtype=torch.int64)
    return torch.cat([s for s, _ in best]), torch.cat([p for _, p in best])


_CHUNK_ELEMENTS = 2**22  # similarities at once: 32 MiB in float64


# The first of equally near neighbors in the index is chosen, also if all images have the same features (a collapsed
# model): similarities are lowered by this share of the largest per row. For a million images, that is below the
# resolution of float32.
_TIE_BREAK = 2.0**-48
