"""A micro-batch: how a loader worker reads, transforms and collates it.

Random numbers are keyed by sample, not by process, so any number of ranks and workers makes the same pixels.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vissl_zero.data.boxes import CropBoxes
from vissl_zero.data.changes import Changes
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.data.source import Source
from vissl_zero.errors import DataError, VisslZeroError


@dataclass(frozen=True)
class Loaded:
    """A worker's answer.

    Attributes:
        batch: the micro-batch, or None after an error.
        error: message for the user, if the data or the configuration is at fault; empty otherwise.
        skipped: broken files that other images replaced: name -> reason.
    """

    batch: ImageBatch | None
    error: str = ""
    skipped: dict[str, str] = field(default_factory=dict)

    def pin_memory(self) -> Loaded:
        """Copy the batch to page-locked memory, for torch's DataLoader."""
        return Loaded(self.batch.pin_memory() if self.batch else None, self.error, self.skipped)


_CACHED_VALUES = 2**18  # bytes of 8-bit crops: a quarter of a core's L2 cache


class MicroBatchDataset(Dataset[Loaded]):
    """A data set whose indices are plans of micro-batches. Augmentations depend on (seed, epoch, sample id) alone.

    Args:
        source: the images.
        pipeline: pipeline from an image to its crops.
        seed: SEED_VALUE.
        skip_broken: replace a broken image by the next readable one of the source, instead of raising.
        label_type: LABEL_TYPE, the target of a sample: "standard" (its class), "sample_index" or "zero".
        boxes: draws the boxes of crops; None: batches have no boxes.
    """

    def __init__(
        self,
        source: Source,
        pipeline: Pipeline,
        seed: int,
        skip_broken: bool,
        label_type: str = "standard",
        boxes: CropBoxes | None = None,
    ):
        self.source = source
        self.pipeline = pipeline
        self.seed = seed
        self.skip_broken = skip_broken
        self.label_type = label_type
        self.boxes = boxes
        # Name and reason, not the exception, whose traceback would keep the image in memory.
        self._broken: dict[int, tuple[str, str]] = {}

    def __getitem__(self, plan: MicroBatchPlan) -> Loaded:
        """Load one micro-batch in a process with other work; the process's random states are restored."""
        with borrowed_randomness():
            return self.load(plan)

    def load(self, plan: MicroBatchPlan, empty: Callable[..., Tensor] = torch.empty) -> Loaded:
        """Load one micro-batch in a dedicated process; ``empty(shape, dtype=...)`` allocates its images."""
        # A user's error is sent as text: an exception raised in a worker arrives wrapped in two tracebacks. Other
        # exceptions, such as a defect in a custom transform, need these tracebacks.
        skipped: dict[str, str] = {}
        try:
            return Loaded(self._collated(plan, empty, skipped), skipped=skipped)
        except VisslZeroError as error:
            return Loaded(None, error=str(error))

    def _sample(self, sample_id: int, epoch: int, skipped: dict[str, str]) -> tuple[list[Any], _Sample]:
        """Load one sample, or the first readable image after it; return its crops and its other data."""
        # The next image of the source, not a random one: the replacement is the same on any rank and worker.
        for shift in range(len(self.source)):
            index = (sample_id + shift) % len(self.source)
            try:
                # Known from an earlier epoch: do not decode a broken file again.
                if index in self._broken:
                    raise BrokenImageError(*self._broken[index])
                image = self.pipeline.read(self.source, index)
                boxes = None
                if self.boxes is not None:
                    # The same seed as below: the boxes are drawn with the numbers that the transforms are about to
                    # draw.
                    seed_sample(self.seed, epoch, sample_id)
                    boxes = self.boxes.draw(*self.pipeline.size(image))
                # Keyed by the planned sample and set after reading, so that neither a replacement nor a decoder changes
                # the draws.
                seed_sample(self.seed, epoch, sample_id)
                crops, mask = self.pipeline.sample(image)
                return crops, _Sample(mask, self.source.label(index), boxes)
            except BrokenImageError as error:
                if not self.skip_broken:
                    raise
                self._broken[index] = error.name, error.reason
                skipped[error.name] = error.reason
        name, reason = next(iter(self._broken.values()))
        raise DataError(
            f"None of the {len(self.source)} images can be used ({name}: {reason}). "
            "Correct DATA_PATHS or repair the files."
        )

    def _collated(self, plan: MicroBatchPlan, empty: Callable[..., Tensor], skipped: dict[str, str]) -> ImageBatch:
        """Load the samples of a plan into one batch."""
        rows: _Rows | None = None
        samples: list[_Sample] = []
        for sample_id in plan.sample_ids:
            crops, sample = self._sample(sample_id, plan.epoch, skipped)
            if rows is None:
                rows = _Rows(self.pipeline, crops, len(plan.sample_ids), empty)
            if (shapes := _shapes(crops)) != rows.shapes:
                raise DataError(
                    f"The crops of {self.source.name(sample_id)} have other shapes than those of "
                    f"{self.source.name(plan.sample_ids[0])}: {tuple(shapes[0])}, not {tuple(rows.shapes[0])}. "
                    "Add a transform that makes one size of all images, such as {name: RandomResizedCrop, size: 224}."
                )
            rows.append(crops)
            samples.append(sample)
        assert rows is not None, "a plan has samples"
        rows.flush()
        # The planned ids, also of replaced images: losses that remember images address them by these.
        ids = torch.tensor(plan.sample_ids, dtype=torch.int64)
        return ImageBatch(
            images=rows.images,
            changes=rows.changes(),
            num_crops=[len(crops) for crops in rows.resolutions],
            targets=self._targets([sample.label for sample in samples], ids),
            sample_ids=ids,
            num_global=plan.num_global,
            stand_ins=tuple(position for position, id_ in enumerate(plan.sample_ids) if id_ in self._broken),
            masks=torch.stack(masks) if (masks := [s.mask for s in samples if s.mask is not None]) else None,
            boxes=_rows_of_boxes(samples, [crop for crops in rows.resolutions for crop in crops]),
        )

    def _targets(self, labels: list[int | None], ids: Tensor) -> Tensor | None:
        if self.label_type == "sample_index":
            return ids.clone()
        if self.label_type == "zero":
            return torch.zeros_like(ids)
        return None if None in labels else torch.tensor(labels, dtype=torch.int64)


class _Sample(NamedTuple):
    """Data of an image in addition to its crops: mask (H, W), label, and boxes (V, 4) of crops; None if missing."""

    mask: Tensor | None
    label: int | None
    boxes: Tensor | None


class _Rows:
    """The images of a batch, one tensor per resolution, into which each sample's crops are written.

    Args:
        pipeline: pipeline that made the crops.
        crops: crops of the first sample; those of all samples must have the same shapes.
        num_samples: B, samples of the batch.
        empty: ``empty(shape, dtype=...)`` allocates a tensor.
    Attributes:
        shapes: shape of each crop.
        resolutions: indices of the crops of each resolution.
        images: see ``ImageBatch``.
    """

    def __init__(self, pipeline: Pipeline, crops: Sequence[Any], num_samples: int, empty: Callable[..., Tensor]):
        self.shapes = _shapes(crops)
        self.resolutions = [
            [index for index, shape in enumerate(self.shapes) if shape == resolution]
            for resolution in dict.fromkeys(self.shapes)
        ]
        self.images = [
            empty((len(same) * num_samples, *self.shapes[same[0]]), dtype=crops[same[0]].dtype)
            for same in self.resolutions
        ]
        self._pipeline = pipeline
        # A few samples at a time, while their crops are still in the processor's cache.
        self._at_a_time = max(1, _CACHED_VALUES // sum(map(math.prod, self.shapes)))
        self._waiting: list[Sequence[Any]] = []
        # For each crop: its row of each sample, and the notes of ``write``.
        self._rows: list[Iterator[Any]] = [iter(())] * len(crops)
        self._notes: list[list[Any]] = [[] for _ in crops]
        for images, same in zip(self.images, self.resolutions, strict=True):
            for number, index in enumerate(same):
                self._rows[index] = iter(pipeline.rows(images[number * num_samples : (number + 1) * num_samples]))

    def append(self, crops: Sequence[Any]) -> None:
        """Add the crops of the next sample."""
        self._waiting.append(crops)
        if len(self._waiting) == self._at_a_time:
            self.flush()

    def flush(self) -> None:
        """Write the waiting crops."""
        # By crop and not by sample: rows of one crop are consecutive in memory.
        for index, (rows, notes) in enumerate(zip(self._rows, self._notes, strict=True)):
            notes += [self._pipeline.write(crops[index], next(rows)) for crops in self._waiting]
        self._waiting.clear()

    def changes(self) -> tuple[Changes, ...]:
        """Gather the changes that the device makes to the images of each resolution; empty: none."""
        notes = [[note for index in same for note in self._notes[index]] for same in self.resolutions]
        changes = [self._pipeline.changes(of_images) for of_images in notes]
        return tuple(change for change in changes if change is not None)


def _shapes(crops: Sequence[Any]) -> list[tuple[int, ...]]:
    return [crop.shape for crop in crops]


def _rows_of_boxes(samples: Sequence[_Sample], order: Sequence[int]) -> Tensor | None:
    """Gather the boxes of all crops, crop-major, with the crops in the order of the batch."""
    boxes = [sample.boxes[list(order)] for sample in samples if sample.boxes is not None]
    return torch.stack(boxes, dim=1).flatten(0, 1) if boxes else None


# Tensors of a batch besides the images: with a row per sample, and with a row per crop. All but the ids are optional.
BY_SAMPLE = ("sample_ids", "targets", "masks")
BY_CROP = ("boxes",)


@dataclass(frozen=True)
class ImageBatch:
    """This rank's part of one global micro-batch, crops grouped by resolution.

    Attributes:
        images: one tensor per resolution, (num_crops[r] * B, 3, H_r, W_r), crop-major: row j shows crop j // B of
            sample j % B. Resolutions are in the order in which the transforms first made them.
        num_crops: crops per sample at each resolution.
        targets: (B,) int64 labels, or None without labels.
        sample_ids: (B,) int64, each sample's index in the source. A sample whose broken image was replaced keeps its
            index; image and label are the replacement's.
        num_global: samples of this micro-batch over all ranks, also of a partial last batch.
        stand_ins: positions from 0 to B - 1 of the samples that were replaced.
        masks: (B, H, W) uint8, the class of each pixel of the one crop, 255 where ignored; None without masks.
        boxes: (V * B, 4) float32, the box of each crop in its image (``CropBoxes``), V crops of all resolutions,
            crop-major; None: the transforms do not keep them.
        changes: pending changes of the images of each resolution, which are then uint8; ``to`` applies them.
    """

    images: list[Tensor]
    num_crops: list[int]
    targets: Tensor | None
    sample_ids: Tensor
    num_global: int
    stand_ins: tuple[int, ...] = ()
    masks: Tensor | None = None
    boxes: Tensor | None = None
    changes: tuple[Changes, ...] = ()

    @property
    def beside(self) -> dict[str, Tensor]:
        """Tensors of the batch other than images and changes, by name."""
        return {name: rows for name in (*BY_SAMPLE, *BY_CROP) if (rows := getattr(self, name)) is not None}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        changes = [tensor for change in self.changes for tensor in change.tensors]
        return [*self.images, *changes, *self.beside.values()]

    @property
    def num_local(self) -> int:
        """B, the samples of this micro-batch on this rank; ranks differ by one at most."""
        return len(self.sample_ids)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> ImageBatch:
        """Copy the batch to ``device``, apply its changes, cast images to ``dtype``; asynchronous if pinned."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        if self.changes:
            # copy=True: changes are made in place, and on the CPU the batch may be used again.
            copies = [image.to(device, non_blocking=True, copy=True) for image in self.images]
            changes = [change.each(copied) for change in self.changes]
            images = [change(copy).to(dtype) for change, copy in zip(changes, copies, strict=True)]
        else:
            images = [image.to(device=device, dtype=dtype, non_blocking=True) for image in self.images]
        return self._with(images, copied, ())

    def pin_memory(self) -> ImageBatch:
        """Copy the batch to page-locked memory; torch's DataLoader calls this on CUDA."""
        changes = tuple(change.each(Tensor.pin_memory) for change in self.changes)
        return self._with([image.pin_memory() for image in self.images], Tensor.pin_memory, changes)

    def _with(
        self, images: list[Tensor], copied: Callable[[Tensor], Tensor], changes: tuple[Changes, ...]
    ) -> ImageBatch:
        beside: dict[str, Any] = {name: copied(rows) for name, rows in self.beside.items()}
        return replace(self, images=images, changes=changes, **beside)

    def take(self, first: int, last: int) -> ImageBatch:
        """Return the samples from ``first`` to ``last``, exclusive. Changes must have been applied."""
        chosen = slice(first, last)

        def of_crops(rows: Tensor, num_crops: int) -> Tensor:
            # Rows are crop-major, so the samples of a part are not consecutive.
            return rows.unflatten(0, (num_crops, self.num_local))[:, chosen].flatten(0, 1)

        num_all = sum(self.num_crops)
        beside: dict[str, Any] = {
            name: of_crops(rows, num_all) if name in BY_CROP else rows[chosen] for name, rows in self.beside.items()
        }
        return replace(
            self,
            images=[of_crops(image, count) for image, count in zip(self.images, self.num_crops, strict=True)],
            stand_ins=tuple(place - first for place in self.stand_ins if first <= place < last),
            **beside,
        )


def join_batches(parts: Sequence[ImageBatch], num_global: int) -> ImageBatch:
    """Concatenate batches by sample. If they hold images, ``changes`` must have been applied to them.

    Args:
        parts: batches of several ranks or micro-batches; each may have no samples.
        num_global: samples of the result over all ranks.
    """
    sizes = [part.num_local for part in parts]
    begins = [sum(sizes[:place]) for place in range(len(sizes))]
    num_crops = parts[0].num_crops

    def of_crops(rows: Sequence[Tensor], count: int) -> Tensor:
        by_crop = [one.unflatten(0, (count, size)) for one, size in zip(rows, sizes, strict=True)]
        return torch.cat(by_crop, dim=1).flatten(0, 1)

    beside: dict[str, Any] = {}
    for name in parts[0].beside:
        rows = [part.beside[name] for part in parts]
        beside[name] = of_crops(rows, sum(num_crops)) if name in BY_CROP else torch.cat(rows)
    return replace(
        parts[0],
        images=[of_crops([part.images[r] for part in parts], num_crops[r]) for r in range(len(parts[0].images))],
        num_global=num_global,
        stand_ins=tuple(begin + place for begin, part in zip(begins, parts, strict=True) for place in part.stand_ins),
        changes=(),
        **beside,
    )


_SHUFFLE = -1  # stands for the sample id in the key of an epoch's order


def _key_of(seed: int, epoch: int, sample_id: int) -> int:
    """Hash (seed, epoch, sample) to 64 bits, the same on every machine."""
    # A hash and not a sum: seed 0, epoch 1 and seed 1, epoch 0 must not share random numbers.
    return int.from_bytes(blake2b(struct.pack("<qqq", seed, epoch, sample_id), digest_size=8).digest(), "little")


def epoch_of_views(epoch: int, period: int | None) -> int:
    """Return the epoch that keys an epoch's augmentations: with AUGMENTATION_PERIOD they repeat after ``period``."""
    return epoch % period if period else epoch


def seed_sample(seed: int, epoch: int, sample_id: int) -> None:
    """Seed torch's (CPU), numpy's and Python's generators for one sample. Costs 10 microseconds."""
    key = _key_of(seed, epoch, sample_id)
    # torch.manual_seed would also seed every accelerator, in 170 microseconds.
    torch.default_generator.manual_seed(key)
    # numpy's legacy generator takes 32 bits.
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def borrowed_randomness() -> Iterator[None]:
    """Restore the three random states after ``seed_sample``, in a process with other work. A context manager."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def shuffled(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Draw the order of an epoch: a permutation of (num_samples,) int64, keyed by (seed, epoch)."""
    generator = torch.Generator().manual_seed(_key_of(seed, epoch, _SHUFFLE))
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True)
class MicroBatchPlan:
    """The samples that one rank loads for one global micro-batch.

    Attributes:
        epoch: epoch that keys the augmentations.
        sample_ids: this rank's samples.
        num_global: samples over all ranks.
    """

    epoch: int
    sample_ids: tuple[int, ...]
    num_global: int
