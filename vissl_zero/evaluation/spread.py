"""How many dimensions features use: figures of a trunk's quality that need no labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vissl_zero.collectives import all_gather_rows
from vissl_zero.data.dataset import MicroBatchDataset
from vissl_zero.data.order import MicroBatchPlan, rank_slice, sequential
from vissl_zero.data.source import Source
from vissl_zero.data.transforms.pipeline import build_pipeline
from vissl_zero.data.workers import BatchStream
from vissl_zero.engine.hook import Run
from vissl_zero.evaluation.features import evaluating

_EPSILON = 1e-7  # added to each share, as both papers have it
_RIDGE = 1e-4  # LiDAR's delta, added to the diagonal of the scatter within images


def rankme(rows: Tensor) -> float:
    """RankMe, https://arxiv.org/abs/2210.02885, section 3: exponential of the entropy of the singular values' shares.

    Args:
        rows: (N, F) features of N images, not centred.
    Returns:
        From 1 to about F; NaN if a feature is not finite.
    Cost: a product of N * F * F multiplications and the eigenvalues of an F x F matrix. Not a collective.
    """
    wide = rows.double()
    return _smooth_rank(wide.T @ wide, is_squared=True)


def lidar(views: Tensor) -> float:
    """LiDAR, https://arxiv.org/abs/2312.04000, section 4: the smooth rank of linear discriminant analysis' matrix, with
    images for classes and augmented views for their samples.

    Args:
        views: (n, q, F) features of q views of each of n images; n and q above 1.
    Returns:
        From 1 to about the smaller of F and n - 1; NaN if a feature is not finite.
    Cost: (n * q + n) * F * F multiplications and two sets of eigenvalues of an F x F matrix. Not a collective.
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
    return _smooth_rank(whiten @ between @ whiten, is_squared=False)


def _smooth_rank(matrix: Tensor, is_squared: bool) -> float:
    """Exponential of the entropy of the eigenvalues' shares; of their roots if the matrix is a square."""
    if not bool(torch.isfinite(matrix).all()):
        return math.nan
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp(min=0)
    values = values.sqrt() if is_squared else values
    shares = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny) + _EPSILON
    return math.exp(float(-(shares * shares.log()).sum()))


def view_features(run: Run, source: Source, num_views: int) -> Tensor:
    """Features (n, num_views, F) of training's own views of n images. Collective; equal on every rank.

    The views are the crops of the first size that the training transforms make of an image in epochs 0, 1 and so on, so
    they follow from the seed and the image alone.

    Args:
        run: with a sharded model in any mode; its running statistics must be those of all ranks already.
        source: the images.
        num_views: q.
    Cost: n * num_views forward passes, shared among ranks; augmentations are drawn again.
    """
    data_cfg: Mapping[str, Any] = run.plan.config["DATA"]
    pipeline = build_pipeline(data_cfg["TRAIN"]["TRANSFORMS"], "config.DATA.TRAIN.TRANSFORMS")
    dataset = MicroBatchDataset(source, pipeline, run.plan.seed, skip_broken=data_cfg["ON_BROKEN_IMAGE"] == "skip")
    dtype = getattr(torch, run.plan.sharding.precision.master)
    passes, epoch = list[Tensor](), 0
    with evaluating(run.sharded.model):
        while sum(found.shape[1] for found in passes) < num_views:
            rows, ids = [], []
            for batch in BatchStream(dataset, data_cfg).load(_plans(run, len(source), epoch)):
                own = rank_slice(batch.num_global, run.rank, run.world_size)
                num_own = own.stop - own.start  # 0 for the copy that a rank without a sample has
                moved = batch.to(run.device, dtype)
                (features,) = run.sharded.model(moved.images[:1], features_only=True)
                by_crop = features.unflatten(0, (batch.num_crops[0], -1)).transpose(0, 1)  # rows are crop-major
                rows.append(by_crop[:num_own].to(torch.promote_types(features.dtype, torch.float32)))
                ids.append(moved.sample_ids[:num_own])
            order = all_gather_rows(torch.cat(ids)).argsort()
            passes.append(all_gather_rows(torch.cat(rows))[order])
            epoch += 1
    return torch.cat(passes, dim=1)[:, :num_views]


def _plans(run: Run, num_samples: int, epoch: int) -> Iterator[MicroBatchPlan]:
    batch = run.plan.batch_per_rank * run.world_size
    return (replace(plan, epoch=epoch) for plan in sequential(num_samples, batch, run.rank, run.world_size))
