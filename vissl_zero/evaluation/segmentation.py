"""Intersection over union on images on which the model was not trained, during training and at the end.

Every image and mask is checked before the first step, so that all unusable ones are named at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vissl_zero.collectives import all_gather_objects, all_reduce_sum
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.loader import EvalImages, build_eval_images, require_evaluation
from vissl_zero.data.source import Source, checks_of, masks_of
from vissl_zero.engine.hook import Run
from vissl_zero.errors import ConfigError, DataError, Problem
from vissl_zero.evaluation.curve import CurveHook
from vissl_zero.evaluation.features import evaluated, own_batches, rows_to_write
from vissl_zero.evaluation.pictures import middles
from vissl_zero.methods.segmentation import as_large_as
from vissl_zero.resolve.pairs import IGNORED, listed
from vissl_zero.terminal import print_line

_NUM_PICTURES = 8


@dataclass(frozen=True)
class Overlap:
    """The overlap of predicted and true classes of pixels.

    Attributes:
        miou: mean intersection over union of the classes that are present or predicted.
        pixel_accuracy: share of counted pixels whose class is predicted.
        by_class: intersection over union of each class; None: the class is neither present nor predicted.
    """

    miou: float
    pixel_accuracy: float
    by_class: list[float | None]


def overlap(confusion: Tensor) -> Overlap | None:
    """Compute the overlap of a confusion matrix; None if no pixel counts.

    Args:
        confusion: number of pixels by true class and by prediction, (C, K) int64; K is at least C.
    """
    right, total = confusion.diagonal(), int(confusion.sum())
    if not total:
        return None
    # An output beyond the classes has no union of its own, but counts against the class of the pixel.
    unions = confusion.sum(dim=1) + confusion.sum(dim=0)[: len(confusion)] - right
    shares = zip(right.tolist(), unions.tolist(), strict=True)
    by_class = [intersection / union if union else None for intersection, union in shares]
    known = [share for share in by_class if share is not None]
    return Overlap(sum(known) / len(known), int(right.sum()) / total, by_class)


@dataclass(frozen=True)
class SegmentedImage:
    """An image of TEST with its mask and prediction, on the CPU.

    Attributes:
        image: image (3, H, W) after the transforms.
        mask: class of each pixel, (H, W) uint8; 255: the pixel does not count.
        predicted: predicted class of each pixel, (H, W) uint8.
    """

    image: Tensor
    mask: np.ndarray
    predicted: np.ndarray


class SegmentationHook(CurveHook):
    """Measures intersection over union on TEST's images: before training, every TEST_EVERY_NUM_EPOCH epochs, and last.

    Adds to the results: ``miou_latest`` while it trains, ``miou_by_step`` ([step, mIoU] each); at the end ``miou``,
    ``pixel_accuracy`` and ``iou_by_class`` (0 to 1; None where TEST has no images). Nothing is added for other methods,
    or without TEST_MODEL.

    Attributes:
        pictures: a few images of TEST with the final predictions; on rank 0.
    """

    figure = "miou"

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[SegmentedImage] = []

    def on_start(self, run: Run) -> None:
        """Check all images and masks, and measure the untrained model. Collective."""
        if not run.method.predicts_pixels:
            return
        _require_pairs(run)
        if run.num_steps and not run.is_resumed and run.plan.config.TEST_EVERY_NUM_EPOCH > 0:
            self._measure(run)

    def on_epoch_end(self, run: Run) -> None:
        if run.is_due(run.plan.config.TEST_EVERY_NUM_EPOCH) and (overlaps := self._measure(run)) is not None:
            run.results["miou_latest"] = overlaps.miou

    def on_end(self, run: Run) -> None:
        if not _is_measured(run):
            return
        overlaps, images = self._measure(run), _test_images(run)
        run.results.pop("miou_latest", None)
        run.results["miou"] = None if overlaps is None else overlaps.miou
        if overlaps is None or images is None:
            return
        run.results["pixel_accuracy"] = overlaps.pixel_accuracy
        run.results["iou_by_class"] = dict(zip(images.source.class_names, overlaps.by_class, strict=True))
        self.pictures = _segmented_images(run, images)

    def _measure(self, run: Run) -> Overlap | None:
        """Measure the current model, and add it to the curve. Collective."""
        images = _test_images(run) if _is_measured(run) else None
        overlaps = None if images is None else overlap(_confusion_of(run, images))
        if overlaps is None:
            return None
        self._add(run, overlaps.miou)
        return overlaps


def _is_measured(run: Run) -> bool:
    return run.method.predicts_pixels and run.plan.config.TEST_MODEL


def _test_images(run: Run) -> EvalImages | None:
    """Open TEST's images; call it for each evaluation, so that loader workers end with it."""
    _, images = build_eval_images(run.plan.config.DATA, run.plan.seed)
    return images if images is not None and masks_of(images.source) is not None else None


def _confusion_of(run: Run, images: EvalImages) -> Tensor:
    """Count pixels by class and by prediction. Collective; the result is equal on every rank.

    Args:
        run: run with a sharded model in any mode.
        images: images with masks, in any number; each is counted once.
    Returns:
        Confusion matrix (C, K) int64 for C classes and K outputs.
    """
    run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the result must not
    num_classes = len(images.source.class_names)
    counts = list[Tensor]()
    with evaluated(run) as model:
        for batch, num_own in own_batches(run, images):
            assert batch.masks is not None, "the source has masks"
            # At the size of the masks: shrinking these would lose small objects.
            logits = as_large_as(model(batch.images)[0], batch.masks)
            kept = rows_to_write(batch, num_own)
            counts.append(_confusion(logits[kept], batch.masks[kept], num_classes))
    return all_reduce_sum(torch.stack(counts).sum(dim=0))


def _confusion(logits: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """Count pixels by class and prediction, (num_classes, K), of logits (n, K, H, W) and masks (n, H, W)."""
    width, is_counted = logits.shape[1], masks != IGNORED
    # One bincount over pairs of class and prediction, instead of a pass for each class.
    cells = masks[is_counted].long() * width + logits.argmax(dim=1)[is_counted]
    return torch.bincount(cells, minlength=num_classes * width).view(num_classes, width)


def _segmented_images(run: Run, images: EvalImages) -> list[SegmentedImage]:
    """Segment a few images, evenly spaced in the source; empty if they cannot be read. Collective.

    Cost: a forward pass for each, on every rank.
    """
    dtype = getattr(torch, run.plan.sharding.precision.master)
    try:
        places = middles(len(images), _NUM_PICTURES)
        read = [images.transform.sample(images.transform.read(images.source, place)) for place in places]
    except (DataError, OSError):  # a report must not fail a run that has ended well
        return []
    chosen = []
    with evaluated(run) as model:
        for (image,), mask in read:
            assert mask is not None, "the source has masks"
            logits = as_large_as(model([image[None].to(run.device, dtype)])[0], mask[None])
            predicted = logits[0].argmax(dim=0).to(torch.uint8).cpu().numpy()
            chosen.append(SegmentedImage(image, mask.numpy(), predicted))
    return chosen if run.is_main else []


_FIX = "Repair or delete them, or set config.DATA.ON_BROKEN_IMAGE=skip."


def _require_pairs(run: Run) -> None:
    """Check size, format and classes of every image and mask before training. Collective; ranks share the work.

    With ``ON_BROKEN_IMAGE: skip``, unusable pairs are printed, and the loader skips them.

    Raises:
        ConfigError: a head has too few outputs for the classes, or the images have no masks.
        DataError: images or masks cannot be used; all are named.
    Cost: decodes each mask and reads the header of each image.
    """
    data = run.plan.config.DATA
    require_evaluation(data, run.plan.seed)
    test = _test_images(run)
    sources = [run.loader.source] * (run.num_steps > 0) + ([test.source] if test is not None else [])
    for source in sources:
        _require_outputs(run, source)
    problems = [line for source in sources for line in _wrong(run, source)]
    if not problems:
        return
    if data.ON_BROKEN_IMAGE != "skip":
        raise DataError(f"{len(problems):,} pairs of image and mask cannot be used: {listed(problems)}. {_FIX}")
    if run.is_main:
        print_line(f"warning: {len(problems):,} pairs of image and mask are skipped: {listed(problems)}.")


def _require_outputs(run: Run, source: Source) -> None:
    outputs, num_classes = run.plan.config.MODEL.HEAD.PARAMS[0][1].get("dims", [-1])[-1], len(source.class_names)
    if masks_of(source) is not None and 0 < outputs < num_classes:
        must, fix = f"must end in an output for each of the {num_classes} classes", "Write -1 for the last of dims."
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", f"{outputs} outputs", must, fix)])


def _wrong(run: Run, source: Source) -> list[str]:
    """List the problems of a source's pairs, in its order. Collective; equal on every rank."""
    check = checks_of(source)
    if check is None:
        return []
    indices = range(run.rank, len(source), run.world_size)
    with ThreadPoolExecutor(max(1, run.plan.config.DATA.NUM_DATALOADER_WORKERS)) as pool:  # decoders release the GIL
        complaints = pool.map(lambda index: (index, _problem_of(check, index)), indices)
        problems = [(index, text) for index, text in complaints if text]
    return [text for _, text in sorted(line for lines in all_gather_objects(problems) for line in lines)]


def _problem_of(check: Callable[[int], None], index: int) -> str:
    try:
        check(index)
    except BrokenImageError as error:
        return f"{error.name}: {error.reason}"
    return ""
