"""One micro-batch: how a loader worker reads, transforms and collates it, and what the loop, model and loss get.

Random numbers belong to a sample, not to a process, so any number of ranks and workers makes the same pixels.
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
        error: what a person must be told, where the fault is theirs. Sent as text, because an exception raised in a
            worker arrives in the main process wrapped in two tracebacks. Other exceptions (a defect in a user's own
            transform, say) are left to do just that.
        skipped: broken files that other images stood in for: name -> reason.
    """

    batch: ImageBatch | None
    error: str = ""
    skipped: dict[str, str] = field(default_factory=dict)

    def pin_memory(self) -> Loaded:
        """Copy the batch to page-locked memory, for torch's DataLoader."""
        return Loaded(self.batch.pin_memory() if self.batch else None, self.error, self.skipped)


_CACHED_VALUES = 2**18  # of crops of 8 bits, a quarter of a core's second cache


class MicroBatchDataset(Dataset[Loaded]):
    """Micro-batches by their plan. Augmentations depend on (seed, epoch, sample id) alone.

    Args:
        source: the images.
        pipeline: pipeline from an image to its crops.
        seed: SEED_VALUE.
        skip_broken: use the next readable image of the source in place of a broken one, instead of raising.
        label_type: LABEL_TYPE, what a sample's target is: "standard" (its class), "sample_index" or "zero".
        boxes: draws the boxes of the crops; None: nobody asks for them.
    """

    def __init__(
        self,
        source: Source,
        pipeline: Pipeline,
        seed: int,
        skip_broken: bool = False,
        label_type: str = "standard",
        boxes: CropBoxes | None = None,
    ):
        self.source = source
        self.pipeline = pipeline
        self.seed = seed
        self.skip_broken = skip_broken
        self.label_type = label_type
        self.boxes = boxes
        self._broken: dict[int, tuple[str, str]] = {}  # name and reason: an error would keep its stack and its image

    def __getitem__(self, plan: MicroBatchPlan) -> Loaded:
        """Load one micro-batch, in a process that others share: its random numbers are as before afterward."""
        with borrowed_randomness():
            return self.load(plan)

    def load(self, plan: MicroBatchPlan, empty: Callable[..., Tensor] = torch.empty) -> Loaded:
        """Load one micro-batch, in a process of its own; ``empty(shape, dtype=...)`` allocates its images."""
        skipped: dict[str, str] = {}
        try:
            return Loaded(self._collated(plan, empty, skipped), skipped=skipped)
        except VisslZeroError as error:
            return Loaded(None, error=str(error))

    def _sample(self, sample_id: int, epoch: int, skipped: dict[str, str]) -> tuple[list[Any], _Sample]:
        """Load one sample, or the first readable image after it. Returns its crops and what else it has."""
        for shift in range(len(self.source)):
            index = (sample_id + shift) % len(self.source)
            try:
                # It could not be decoded before, and a worker lives through all epochs.
                if index in self._broken:
                    raise BrokenImageError(*self._broken[index])
                image = self.pipeline.read(self.source, index)
                boxes = None
                if self.boxes is not None:
                    seed_sample(self.seed, epoch, sample_id)
                    boxes = self.boxes.draw(*self.pipeline.size(image))
                # By the sample asked for, and after the image was read: neither a stand-in nor a decoder moves the
                # random numbers.
                seed_sample(self.seed, epoch, sample_id)
                crops, mask = self.pipeline.sample(image)
                return crops, _Sample(mask, self.source.label(index), boxes)
            except BrokenImageError as error:
                if not self.skip_broken:
                    raise
                self._broken[index] = error.name, error.reason
                skipped[error.name] = error.reason
        raise DataError(f"None of the {len(self.source)} images can be read. Correct DATA_PATHS or repair the files.")

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
        ids = torch.tensor(plan.sample_ids, dtype=torch.int64)
        return ImageBatch(
            images=rows.images,
            changes=rows.changes(),
            num_crops=[len(crops) for crops in rows.resolutions],
            targets=self._targets([sample.label for sample in samples], ids),
            sample_ids=ids,
            num_global=plan.num_global,
            stand_ins=tuple(place for place, id_ in enumerate(plan.sample_ids) if id_ in self._broken),
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
    """Facts of an image beside its crops: mask (H, W), label, and the boxes (V, 4) of crops; None: it has none."""

    mask: Tensor | None
    label: int | None
    boxes: Tensor | None


class _Rows:
    """The images of a batch, one tensor per resolution, into which each sample's crops are written.

    Crops are written a few samples at a time, while they are still in the processor's cache.

    Args:
        pipeline: makes the crops.
        crops: those of one sample; all samples have crops of these shapes.
        num_samples: B, samples of the batch.
        empty: ``empty(shape, dtype=...)`` allocates.
    Attributes:
        shapes: of the crops.
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
        self._at_a_time = max(1, _CACHED_VALUES // sum(map(math.prod, self.shapes)))
        self._waiting: list[Sequence[Any]] = []
        # By crop: its row for each sample, and the notes of ``write``.
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
        """Write what waits."""
        for index, (rows, notes) in enumerate(zip(self._rows, self._notes, strict=True)):
            notes += [self._pipeline.write(crops[index], next(rows)) for crops in self._waiting]
        self._waiting.clear()

    def changes(self) -> tuple[Changes, ...]:
        """Gather what the device is to do to the images of each resolution; empty: nothing."""
        notes = [[note for index in same for note in self._notes[index]] for same in self.resolutions]
        changes = [self._pipeline.changes(of_images) for of_images in notes]
        return tuple(change for change in changes if change is not None)


def _shapes(crops: Sequence[Any]) -> list[tuple[int, ...]]:
    return [crop.shape for crop in crops]


def _rows_of_boxes(samples: Sequence[_Sample], order: Sequence[int]) -> Tensor | None:
    """Gather the boxes of all crops, crop-major, with the crops in the order of the batch."""
    boxes = [sample.boxes[list(order)] for sample in samples if sample.boxes is not None]
    return torch.stack(boxes, dim=1).flatten(0, 1) if boxes else None


# The tensors beside the images, by what they have a row for. Each may be missing but the ids.
BY_SAMPLE = ("sample_ids", "targets", "masks")
BY_CROP = ("boxes",)


@dataclass(frozen=True)
class ImageBatch:
    """This rank's part of one global micro-batch, crops grouped by resolution.

    Attributes:
        images: one tensor per resolution, (num_crops[r] * B, 3, H_r, W_r), crop-major: row j shows crop j // B of
            sample j % B. Resolutions come in the order in which the transforms first made them.
        num_crops: crops per sample at each resolution.
        targets: (B,) int64 labels, or None when the source has none.
        sample_ids: (B,) int64, each sample's index in the source. A sample replaced because its file is broken keeps
            its own index here; image and label are the replacement's.
        num_global: samples of this micro-batch over all ranks, right for a partial last batch too.
        stand_ins: places from 0 to B - 1 of the samples that were replaced.
        masks: (B, H, W) uint8, the class of each pixel of the one crop, 255 where it does not count; None without.
        boxes: (V * B, 4) float32, the box of each crop in its image (``CropBoxes``), V crops of all resolutions,
            crop-major; None: the transforms do not keep them.
        changes: changes of the images of each resolution, which are uint8 then; ``to`` does them. Empty: they are done.
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
        """The tensors beside the images, by name."""
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
        """Copy the batch to ``device``, do its changes, images as ``dtype``; asynchronously from pinned memory."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        if self.changes:
            copies = [image.to(device, non_blocking=True, copy=True) for image in self.images]
            changes = [change.each(copied) for change in self.changes]
            images = [change(copy).to(dtype) for change, copy in zip(changes, copies, strict=True)]
        else:
            images = [image.to(device=device, dtype=dtype, non_blocking=True) for image in self.images]
        return self._with(images, copied, ())

    def pin_memory(self) -> ImageBatch:
        """Copy the batch to page-locked memory; torch's DataLoader calls this where CUDA is used."""
        changes = tuple(change.each(Tensor.pin_memory) for change in self.changes)
        return self._with([image.pin_memory() for image in self.images], Tensor.pin_memory, changes)

    def _with(
        self, images: list[Tensor], copied: Callable[[Tensor], Tensor], changes: tuple[Changes, ...]
    ) -> ImageBatch:
        beside: dict[str, Any] = {name: copied(rows) for name, rows in self.beside.items()}
        return replace(self, images=images, changes=changes, **beside)

    def take(self, first: int, last: int) -> ImageBatch:
        """Return the samples from ``first`` up to before ``last``. Changes must be done."""
        chosen = slice(first, last)

        def of_crops(rows: Tensor, num_crops: int) -> Tensor:
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
    """Join batches into one that has the samples of all of them, in order. Changes must be done, or no images be there.

    Args:
        parts: of several ranks or micro-batches; each may have no samples.
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


_SHUFFLE = -1  # in place of a sample id


def _key_of(seed: int, epoch: int, sample_id: int) -> int:
    """Mix (seed, epoch, sample) to 64 bits, the same on every machine."""
    return int.from_bytes(blake2b(struct.pack("<qqq", seed, epoch, sample_id), digest_size=8).digest(), "little")


def epoch_of_views(epoch: int, period: int | None) -> int:
    """Return the epoch whose augmentations an epoch shows: AUGMENTATION_PERIOD repeats those of the first ones."""
    return epoch % period if period else epoch


def seed_sample(seed: int, epoch: int, sample_id: int) -> None:
    """Point torch's (CPU), numpy's and Python's random numbers at one sample. Costs 10 microseconds.

    Not ``torch.manual_seed``: that also visits every accelerator and takes 170 microseconds.
    """
    key = _key_of(seed, epoch, sample_id)
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def borrowed_randomness() -> Iterator[None]:
    """Restore the three random states after ``seed_sample`` in a process that others share. A context."""
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
        epoch: the epoch that augmentations are drawn for.
        sample_ids: this rank's samples.
        num_global: samples over all ranks.
    """

    epoch: int
    sample_ids: tuple[int, ...]
    num_global: int
