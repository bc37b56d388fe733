"""Running a sharded model over images without training it: features of all ranks in the order of the images."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import rich
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from vissl_zero.collectives import all_gather_rows
from vissl_zero.config.taps import layer_names
from vissl_zero.data.batch import Batch
from vissl_zero.data.eval_images import EvalImages
from vissl_zero.data.order import rank_slice
from vissl_zero.data.transforms.pipeline import Pipeline
from vissl_zero.engine.hook import Run


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode and no gradients are recorded; then every module is as it was before.

    Module by module, so that batch norm which a recipe keeps in evaluation mode stays there.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: sharded parameters are gathered into views
            yield
    finally:
        for module, training in was_training:
            module.training = training


_SECONDS_BETWEEN_LINES = 5.0


def own_batches(run: Run, images: EvalImages) -> Iterator[tuple[Batch, int]]:
    """This rank's batches on its device, each with the number of samples in it that are this rank's own.

    Rank 0 prints its progress every few seconds, because nothing else is shown during that time.

    The number is 0 for the copy that a rank without a sample gets, so that all ranks call the model equally often:
    call it on every batch, whatever the number is.
    """
    dtype = getattr(torch, run.plan.sharding.precision.master)
    began, said, num_done = time.monotonic(), time.monotonic(), 0
    for batch in images.batches(run.plan.batch_per_rank * run.world_size, run.rank, run.world_size):
        own = rank_slice(batch.num_global, run.rank, run.world_size)
        yield batch.to(run.device, dtype), own.stop - own.start
        num_done, now = num_done + batch.num_global, time.monotonic()
        if run.is_main and now - said >= _SECONDS_BETWEEN_LINES and num_done < len(images):
            said = now
            text = f"evaluating: {num_done:,} of {len(images):,} images, {num_done / (now - began):.0f} images/s"
            rich.get_console().print(text, markup=False, highlight=False, soft_wrap=True)


# Raw pixels are compared as thumbnails: on larger images the background would decide, at a hundred times the memory.
THUMBNAIL_SIDE = 16


@dataclass(frozen=True)
class Features:
    """Features of the images of a source, in its order, equal on every rank.

    Attributes:
        rows: (N, F) features of the trunk, float32 or float64.
        labels: (N,) int64, or None without labels.
        pixels: (N, 3 * h * w) the images themselves, from 0 to 1, at most ``THUMBNAIL_SIDE`` pixels long; None if they
            were not asked for.
    """

    rows: Tensor
    labels: Tensor | None
    pixels: Tensor | None = None

    def at(self, places: Tensor) -> Features:
        """Those of some of the images."""
        labels, pixels = (None if t is None else t[places] for t in (self.labels, self.pixels))
        return Features(self.rows[places], labels, pixels)

    def of_pixels(self) -> Features:
        """The same images with their pixels for features."""
        assert self.pixels is not None, "extract_features was not asked for pixels"
        return Features(self.pixels, self.labels)

    def of_columns(self, columns: slice) -> Features:
        """The same images with some of their features."""
        return Features(self.rows[:, columns], self.labels, self.pixels)


def layers_of(run: Run) -> dict[str, slice]:
    """Columns of each inner layer in the rows that were extracted last; empty where they are the trunk's features."""
    taps = getattr(run.seen, "feature_taps", None)
    if taps is None:
        return {}
    ends = list(accumulate(taps.widths))
    entries = run.plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]["LINEAR_EVAL_FEAT_POOL_OPS_MAP"]
    columns = (slice(end - width, end) for width, end in zip(taps.widths, ends, strict=True))
    return dict(zip(layer_names(entries), columns, strict=True))


def extract_features(run: Run, images: EvalImages, with_pixels: bool = False) -> Features:
    """Run the trunk in evaluation mode over every image of ``images`` once. Collective.

    Cost: a forward pass over the images, shared among ranks; each rank then holds the features of all of them.
    """
    rows, pixels, ids, labels = [], [], [], []
    with run.sharded.evaluated(), evaluating(run.sharded.model):
        for batch, num_own in own_batches(run, images):
            (features,) = run.sharded.model(batch.images, features_only=True)
            rows.append(features[:num_own].to(torch.promote_types(features.dtype, torch.float32)))
            ids.append(batch.sample_ids[:num_own])
            targets = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
            labels.append(targets[:num_own])
            if with_pixels:
                pixels.append(thumbnails(batch.images[0][:num_own], images.transform))
    order = all_gather_rows(torch.cat(ids)).argsort()  # ids are those of the source: 0 to N - 1, each once
    all_labels = all_gather_rows(torch.cat(labels))[order]
    return Features(
        rows=all_gather_rows(torch.cat(rows))[order],
        labels=None if bool((all_labels < 0).any()) else all_labels,
        pixels=all_gather_rows(torch.cat(pixels))[order] if with_pixels else None,
    )


def thumbnails(images: Tensor, transform: Pipeline) -> Tensor:
    """Images before their normalisation, averaged down to thumbnails, one row each.

    Args:
        images: (B, 3, H, W) as ``transform`` makes them.
        transform: its Normalize, if it has one, is undone.
    Returns:
        (B, 3 * h * w) float32, h and w at most ``THUMBNAIL_SIDE``.
    """
    images = images.float()
    for step in reversed(transform.transforms):
        if isinstance(step, torchvision.transforms.Normalize):
            mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (step.mean, step.std))
            images = images * std + mean
    height, width = (min(side, THUMBNAIL_SIDE) for side in images.shape[2:])
    return F.adaptive_avg_pool2d(images, (height, width)).flatten(1)
