"""Training data: the same pixels in the same order at any number of ranks and of loader workers.

``EpochOrder`` computes the samples of each step and each rank, without communication. Evaluation sees every image once,
in the source's order, without augmentation.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from PIL import Image
from torch import Tensor

from vissl_zero.config.blocks.data import Data, split_of
from vissl_zero.data.boxes import boxes_of
from vissl_zero.data.dataset import ImageBatch, MicroBatchDataset, MicroBatchPlan, epoch_of_views, shuffled
from vissl_zero.data.pairs import with_masks
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.data.source import Source, build_eval_sources, build_source
from vissl_zero.data.split_pipeline import build_eval_pipeline, build_split_pipeline, eval_transforms
from vissl_zero.data.workers import BatchStream
from vissl_zero.errors import DataError, counted
from vissl_zero.resolve.resolved import ResolvedRun

logger = logging.getLogger(__name__)


class Loader:
    """This rank's share of every step of every epoch.

    Attributes:
        source: all images, those of other ranks included.
        order: samples of each step.
    """

    def __init__(self, source: Source, order: EpochOrder, stream: BatchStream):
        self.source = source
        self.order = order
        self._stream = stream

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.order.steps_per_epoch

    def epoch(self, epoch: int, start_sample: int = 0) -> Iterator[list[ImageBatch]]:
        """Yield the micro-batches of each step of an epoch. Two epochs must not be iterated at once.

        Args:
            epoch: number of the epoch, from 0.
            start_sample: samples of this epoch that were already trained on, over all ranks.
        Raises:
            DataError: an image cannot be used. On this rank alone.
            ProcessLostError: a loader worker died or does not answer. On this rank alone.
        """
        # Micro-batches of each planned step: workers load several steps ahead, and the last step may be smaller.
        sizes: deque[int] = deque()

        def plans() -> Iterator[MicroBatchPlan]:
            for step in self.order.steps(epoch, start_sample):
                sizes.append(len(step))
                yield from step

        batches = self._stream.load(plans())
        for first in batches:
            yield [first, *islice(batches, sizes.popleft() - 1)]

    def first_images(self, most: int) -> tuple[ImageBatch, int, int]:
        """Load the first images of a micro-batch of full size, without shuffling the data set.

        Args:
            most: largest number of images to load.
        Returns:
            The batch; the number of this rank's images in the whole micro-batch, and of all ranks'.
        Raises:
            DataError: as ``epoch``.
        """
        plan = self.order.first()
        ids = plan.sample_ids[:most]
        # A plan of few images: a dry run needs shapes, not the whole batch.
        batch = next(iter(self._stream.load([MicroBatchPlan(plan.epoch, ids, len(ids))])))
        return batch, len(plan.sample_ids), plan.num_global


def build_train_loader(plan: ResolvedRun, rank: int, world_size: int, data: Data | None = None) -> Loader:
    """Build the loader of the images that a run trains on. Every rank builds its own; nothing is communicated.

    Args:
        plan: plan of the run.
        rank, world_size: rank of this process, and number of ranks.
        data: replaces the plan's DATA.
    Raises:
        ConfigError, DataError: as ``build_loader``.
    """
    return build_loader(
        plan.config.DATA if data is None else data,
        "TRAIN",
        seed=plan.seed,
        batch_per_rank=plan.batch_per_rank,
        rank=rank,
        world_size=world_size,
        accumulation_steps=plan.accumulation_steps,
        is_exact=plan.exact_accumulation,
    )


def build_loader(
    data_cfg: Data,
    split: str,
    seed: int,
    batch_per_rank: int,
    rank: int,
    world_size: int,
    accumulation_steps: int,
    is_exact: bool = False,
) -> Loader:
    """Build the loader of one split. Every rank builds its own; nothing is communicated.

    Args:
        data_cfg: the resolved DATA block.
        split: "TRAIN" or "TEST".
        seed: SEED_VALUE; with (epoch, sample) it decides order and augmentations.
        batch_per_rank: samples per rank and micro-batch.
        rank, world_size: rank of this process, and number of ranks.
        accumulation_steps: micro-batches per optimizer step.
        is_exact: see ``EpochOrder``.
    Raises:
        ConfigError: an unknown source or transform, or wrong arguments.
        DataError: a path is missing or empty, or there are fewer images than ranks or than a batch needs.
    """
    cfg = split_of(data_cfg, split)
    source = build_source(data_cfg, split, seed)
    transform = with_masks(build_split_pipeline(data_cfg, split), source, data_cfg, cfg.TRANSFORMS)
    order = EpochOrder(
        num_samples=len(source),
        # The order is of global micro-batches. How many ranks share one does not change it.
        micro_batch=batch_per_rank * world_size,
        accumulation_steps=accumulation_steps,
        is_exact=is_exact,
        augmentation_period=data_cfg.AUGMENTATION_PERIOD,
        rank=rank,
        world_size=world_size,
        seed=seed,
        drop_last=cfg.DROP_LAST,
    )
    _check_length(order, split)
    dataset = MicroBatchDataset(
        source,
        transform,
        seed,
        skip_broken=data_cfg.ON_BROKEN_IMAGE == "skip",
        label_type=cfg.LABEL_TYPE,
        boxes=boxes_of(cfg.TRANSFORMS, f"config.DATA.{split}.TRANSFORMS"),
    )
    return Loader(source, order, BatchStream(dataset, data_cfg))


def _check_length(order: EpochOrder, split: str) -> None:
    if order.num_samples < order.world_size:
        raise DataError(
            f"config.DATA.{split} has {counted(order.num_samples, 'image')} for {order.world_size} processes. "
            f"Set config.DISTRIBUTED.NUM_PROC_PER_NODE to at most {order.num_samples}, or add images."
        )
    step = order.micro_batch * order.accumulation_steps
    if not order.num_kept:
        raise DataError(
            f"config.DATA.{split} has {counted(order.num_samples, 'image')}, less than one step of {step}, and "
            f"DROP_LAST drops them all. Set config.DATA.{split}.DROP_LAST=False, lower "
            f"config.DATA.{split}.BATCHSIZE_PER_REPLICA, or add images."
        )
    dropped = order.num_samples - order.num_kept
    if dropped and not order.drop_last and order.rank == 0:
        logger.warning(
            "The last %d images of every epoch are left out: fewer than the %d processes.", dropped, order.world_size
        )


def rank_slice(num_samples: int, rank: int, world_size: int) -> slice:
    """Return the slice of a global micro-batch for ``rank``: samples i with i * world_size // num_samples == rank.

    Slices are consecutive, their lengths differ by at most 1, and every sample is in exactly one.
    """
    return slice(-(-rank * num_samples // world_size), -(-(rank + 1) * num_samples // world_size))


@dataclass(frozen=True)
class EpochOrder:
    """The steps of an epoch.

    Attributes:
        num_samples: length of the source.
        micro_batch: samples of a global micro-batch (all ranks).
        accumulation_steps: micro-batches per step.
        rank, world_size: rank of this process, and number of ranks.
        seed: seed of the shuffling.
        is_exact: split a step among ranks first, and then each rank's part into micro-batches, so that a rank's samples
            of the step are consecutive; otherwise split each global micro-batch among ranks.
        drop_last: drop the samples after the last whole step.
        augmentation_period: epochs after which augmentations repeat; None: never. The order never repeats.
    """

    num_samples: int
    micro_batch: int
    accumulation_steps: int
    rank: int
    world_size: int
    seed: int
    drop_last: bool
    is_exact: bool
    augmentation_period: int | None = None

    @property
    def num_kept(self) -> int:
        """Number of samples of an epoch that are trained on.

        Without ``drop_last`` all samples, unless the last micro-batch would have fewer samples than ranks.
        """
        if self.drop_last:
            step = self.micro_batch * self.accumulation_steps
            return self.num_samples // step * step
        tail = self.num_samples % self.micro_batch
        # A rank without samples could not take part in the step, and others would wait for it.
        return self.num_samples - tail if tail < self.world_size else self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps from the start of an epoch to its end; the last may be smaller."""
        return -(-self.num_kept // (self.micro_batch * self.accumulation_steps))

    @property
    def fewest(self) -> int:
        """Fewest samples that a rank has in a micro-batch of a whole epoch."""
        step = self.micro_batch * self.accumulation_steps
        tail = torch.arange(self.num_kept % step or min(step, self.num_kept))
        last_rank = replace(self, rank=self.world_size - 1)  # no rank has fewer (``rank_slice``)
        return min((len(part.sample_ids) for part in last_rank._dealt(0, tail)), default=0)

    def steps(self, epoch: int, start_sample: int = 0) -> Iterator[list[MicroBatchPlan]]:
        """Yield the micro-batches of each step.

        Args:
            epoch: number of the epoch, from 0.
            start_sample: samples of the epoch already trained on, over all ranks; any number, so that a run may resume
                with another batch size or world size.
        """
        order = shuffled(self.num_samples, self.seed, epoch)[start_sample : self.num_kept]
        # num_kept is for a whole epoch; a resumed one may leave another tail with fewer samples than ranks.
        if len(order) % self.micro_batch < self.world_size:
            order = order[: len(order) - len(order) % self.micro_batch]
        views = epoch_of_views(epoch, self.augmentation_period)
        for step in order.split(self.micro_batch * self.accumulation_steps):
            if len(step):  # split of an empty tensor returns one empty part
                yield self._dealt(views, step)

    def first(self) -> MicroBatchPlan:
        """Return the plan of an unshuffled first micro-batch of full size, at the same cost for any data set."""
        step = torch.arange(min(self.micro_batch * self.accumulation_steps, self.num_kept))
        return self._dealt(0, step)[0]

    def _dealt(self, epoch: int, step: Tensor) -> list[MicroBatchPlan]:
        if self.is_exact:
            return self._together(epoch, step)
        return [self._plan(epoch, part) for part in step.split(self.micro_batch)]

    def _together(self, epoch: int, step: Tensor) -> list[MicroBatchPlan]:
        """Split a step among ranks, then each part into micro-batches; fewer if some rank has too few samples."""
        # The shares of all ranks, because every rank must compute the same number of micro-batches.
        shares = [step[rank_slice(len(step), rank, self.world_size)] for rank in range(self.world_size)]
        count = max(1, min(self.accumulation_steps, *map(len, shares)))
        parts = [[share[rank_slice(len(share), index, count)] for share in shares] for index in range(count)]
        return [MicroBatchPlan(epoch, tuple(part[self.rank].tolist()), sum(map(len, part))) for part in parts]

    def _plan(self, epoch: int, part: Tensor) -> MicroBatchPlan:
        local = part[rank_slice(len(part), self.rank, self.world_size)]
        return MicroBatchPlan(epoch, tuple(local.tolist()), len(part))


def sequential(num_samples: int, micro_batch: int, rank: int, world_size: int) -> Iterator[MicroBatchPlan]:
    """Yield plans with every sample once, in order, and the same number of micro-batches on every rank.

    If the last micro-batch has fewer samples than ranks, the remaining ranks get a copy of the last sample.
    """
    # A copy, because every rank must run a sharded model equally often. Results are stored by sample id, so a copy
    # changes nothing.
    for part in torch.arange(num_samples).split(micro_batch):
        local = part[rank_slice(len(part), rank, world_size)].tolist()
        yield MicroBatchPlan(0, tuple(local or [int(part[-1])]), len(part))


class EvalImages:
    """The images of a source under the evaluation transforms.

    Attributes:
        source: the images and their labels.
        transform: TEST.TRANSFORMS, or Resize, CenterCrop, ToTensor and Normalize; one crop.
    """

    def __init__(self, source: Source, transform: Pipeline, stream: BatchStream):
        self.source = source
        self.transform = transform
        self._stream = stream

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[ImageBatch]:
        """Yield this rank's share of every image once.

        Every rank gets the same number of batches, so that a sharded model can run on each. Store results by
        ``sample_ids``: in the last batch a rank may get a copy of the last sample (see ``sequential``).

        Args:
            batch_size: images per batch over all ranks.
            rank, world_size: rank whose share is yielded, and number of ranks.
        Raises:
            DataError: an image cannot be used, or the transforms make several crops.
        """
        for batch in self._stream.load(sequential(len(self.source), batch_size, rank, world_size)):
            if sum(batch.num_crops) != 1:
                raise DataError(
                    f"config.DATA.TEST.TRANSFORMS make {sum(batch.num_crops)} crops of an image; evaluation needs one. "
                    "Leave them empty to resize and crop as TRAIN's largest crops are."
                )
            yield batch


def build_eval_images(data_cfg: Data, seed: int) -> tuple[EvalImages, EvalImages | None]:
    """Prepare images of TRAIN (a kNN's index) and of TEST (its queries), both under the evaluation transforms.

    TEST is None if config.DATA.TEST names no source. A class has the same number in both.

    Raises:
        ConfigError, DataError: as ``build_loader``; also if TEST has a class that TRAIN does not have.
    """
    train, test = build_eval_sources(data_cfg, seed)
    return eval_images(train, data_cfg, seed), None if test is None else eval_images(test, data_cfg, seed)


def require_evaluation(data_cfg: Data, seed: int) -> None:
    """Check the evaluation images before training.

    Cost: indexing the sources; no image is read.

    Raises:
        ConfigError, DataError: as ``build_eval_images``; also if a transform cannot take the previous one's output.
    """
    for images in build_eval_images(data_cfg, seed):
        if images is not None:
            # One made-up image shows whether the transforms fit together, hours before the first evaluation.
            images.transform(Image.new("RGB", (1024, 1024)))  # large enough for any crop


def eval_images(source: Source, data_cfg: Data, seed: int) -> EvalImages:
    """Prepare the images of ``source`` under the evaluation transforms of ``data_cfg``.

    Raises:
        ConfigError: a transform is unknown, or its arguments do not fit.
    """
    pipeline = with_masks(build_eval_pipeline(data_cfg), source, data_cfg, eval_transforms(data_cfg))
    dataset = MicroBatchDataset(source, pipeline, seed, skip_broken=data_cfg.ON_BROKEN_IMAGE == "skip")
    return EvalImages(source, pipeline, BatchStream(dataset, data_cfg, fate="It is left out."))
