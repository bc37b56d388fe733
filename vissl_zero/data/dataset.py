"""What a loader worker does: read, transform and collate one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vissl_zero.data.batch import Batch
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.order import MicroBatchPlan
from vissl_zero.data.seeding import borrowed_randomness, seed_sample
from vissl_zero.data.source import Source
from vissl_zero.data.transforms.pipeline import Pipeline
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

    batch: Batch | None
    error: str = ""
    skipped: dict[str, str] = field(default_factory=dict)

    def pin_memory(self) -> Loaded:
        """For torch's DataLoader."""
        return Loaded(self.batch.pin_memory() if self.batch else None, self.error, self.skipped)


class MicroBatchDataset(Dataset[Loaded]):
    """Micro-batches by their plan. Augmentations depend on (seed, epoch, sample id) alone.

    Args:
        source: the images.
        pipeline: from an image to its crops.
        seed: SEED_VALUE.
        skip_broken: use the next readable image of the source in place of a broken one, instead of raising.
        label_type: LABEL_TYPE, what a sample's target is: "standard" (its class), "sample_index" or "zero".
    """

    def __init__(
        self, source: Source, pipeline: Pipeline, seed: int, skip_broken: bool = False, label_type: str = "standard"
    ):
        self.source = source
        self.pipeline = pipeline
        self.seed = seed
        self.skip_broken = skip_broken
        self.label_type = label_type
        self._broken: dict[int, BrokenImageError] = {}

    def __getitem__(self, plan: MicroBatchPlan) -> Loaded:
        """Load one micro-batch."""
        skipped: dict[str, str] = {}
        try:
            with borrowed_randomness():
                samples = [self._sample(sample_id, plan.epoch, skipped) for sample_id in plan.sample_ids]
            return Loaded(self._collate(samples, plan), skipped=skipped)
        except VisslZeroError as error:
            return Loaded(None, error=str(error))

    def _sample(self, sample_id: int, epoch: int, skipped: dict[str, str]) -> tuple[list[Tensor], int | None]:
        """Crops and label of one sample, or of the first readable image after it."""
        for shift in range(len(self.source)):
            index = (sample_id + shift) % len(self.source)
            try:
                # It could not be decoded before, and a worker lives through all epochs.
                if index in self._broken:
                    raise self._broken[index]
                image = self.source.image(index)
            except BrokenImageError as error:
                if not self.skip_broken:
                    raise
                self._broken[index] = error
                skipped[error.name] = error.reason
                continue
            # By the sample asked for, and after the image was read: neither a stand-in nor a decoder moves the random
            # numbers.
            seed_sample(self.seed, epoch, sample_id)
            return self.pipeline(image), self.source.label(index)
        raise DataError(f"None of the {len(self.source)} images can be read. Correct DATA_PATHS or repair the files.")

    def _collate(self, samples: Sequence[tuple[list[Tensor], int | None]], plan: MicroBatchPlan) -> Batch:
        crops = [crops for crops, _ in samples]
        shapes = [tuple(crop.shape) for crop in crops[0]]
        for sample_id, other in zip(plan.sample_ids, crops, strict=True):
            if [tuple(crop.shape) for crop in other] != shapes:
                raise DataError(
                    f"The crops of {self.source.name(sample_id)} have other shapes than those of "
                    f"{self.source.name(plan.sample_ids[0])}: {tuple(other[0].shape)}, not {shapes[0]}. "
                    "Add a transform that makes one size of all images, such as {name: RandomResizedCrop, size: 224}."
                )
        resolutions = [
            [index for index, shape in enumerate(shapes) if shape == wanted] for wanted in dict.fromkeys(shapes)
        ]
        ids = torch.tensor(plan.sample_ids, dtype=torch.int64)
        return Batch(
            images=[torch.stack([sample[crop] for crop in same for sample in crops]) for same in resolutions],
            num_crops=[len(same) for same in resolutions],
            targets=self._targets([label for _, label in samples], ids),
            sample_ids=ids,
            num_global=plan.num_global,
        )

    def _targets(self, labels: list[int | None], ids: Tensor) -> Tensor | None:
        if self.label_type == "sample_index":
            return ids.clone()
        if self.label_type == "zero":
            return torch.zeros_like(ids)
        return None if None in labels else torch.tensor(labels, dtype=torch.int64)
