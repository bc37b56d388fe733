"""Training data: the same pixels in the same order at any number of ranks and of loader workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from vissl_zero.data.batch import Batch
from vissl_zero.data.dataset import MicroBatchDataset
from vissl_zero.data.order import EpochOrder, MicroBatchPlan
from vissl_zero.data.source import Source, build_source
from vissl_zero.data.transforms.pipeline import Pipeline, build_pipeline
from vissl_zero.data.workers import BatchStream
from vissl_zero.errors import DataError

logger = logging.getLogger(__name__)


class Loader:
    """This rank's share of every step of every epoch.

    Attributes:
        source: all images, those of other ranks included.
        transform: from an image to its crops.
        order: which samples are in which step.
    """

    def __init__(self, source: Source, transform: Pipeline, order: EpochOrder, stream: BatchStream):
        self.source = source
        self.transform = transform
        self.order = order
        self._stream = stream

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.order.steps_per_epoch

    def epoch(self, epoch: int, start_sample: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of each step of an epoch. Begin one epoch after the other, not two at once.

        Args:
            epoch: from 0.
            start_sample: samples of this epoch that were already trained on, over all ranks.
        Raises:
            DataError: an image cannot be used. On this rank alone.
            ProcessLostError: a loader worker died or does not answer. On this rank alone.
        """
        plans = chain.from_iterable(self.order.steps(epoch, start_sample))
        # A second walk over the same order: workers are several micro-batches ahead of the step that asks.
        batches = self._stream.load(plans)
        for step in self.order.steps(epoch, start_sample):
            yield [next(batches) for _ in step]

    def first_images(self, most: int) -> tuple[Batch, int, int]:
        """Load a few images of a micro-batch as large as the first, without shuffling the data set.

        Args:
            most: images to load.
        Returns:
            A batch of at most that many images; this rank's images of the whole micro-batch, and those of all ranks.
        Raises:
            DataError: as ``epoch``.
        """
        plan = self.order.first()
        ids = plan.sample_ids[:most]
        batch = next(iter(self._stream.load([MicroBatchPlan(plan.epoch, ids, len(ids))])))
        return batch, len(plan.sample_ids), plan.num_global


def build_loader(
    data_cfg: Mapping[str, Any],
    split: str,
    seed: int,
    batch_per_rank: int,
    rank: int,
    world_size: int,
    accumulation_steps: int,
    is_exact: bool = False,
) -> Loader:
    """The loader of one split. Every rank builds its own; nothing is communicated.

    Args:
        data_cfg: the resolved DATA block.
        split: "TRAIN" or "TEST".
        seed: SEED_VALUE; with (epoch, sample) it decides order and augmentations.
        batch_per_rank: samples per rank and micro-batch.
        rank, world_size: of this process.
        accumulation_steps: micro-batches per optimizer step.
        is_exact: see ``EpochOrder``.
    Raises:
        ConfigError: an unknown source or transform, or wrong arguments.
        DataError: a path is missing or empty, or there are fewer images than ranks or than a batch needs.
    """
    cfg = data_cfg[split]
    source = build_source(data_cfg, split, seed)
    transform = build_pipeline(cfg["TRANSFORMS"], f"config.DATA.{split}.TRANSFORMS")
    order = EpochOrder(
        num_samples=len(source),
        micro_batch=batch_per_rank * world_size,
        accumulation_steps=accumulation_steps,
        is_exact=is_exact,
        rank=rank,
        world_size=world_size,
        seed=seed,
        drop_last=cfg["DROP_LAST"],
    )
    _check_length(order, split)
    dataset = MicroBatchDataset(
        source,
        transform,
        seed,
        skip_broken=data_cfg["ON_BROKEN_IMAGE"] == "skip",
        label_type=cfg["LABEL_TYPE"],
    )
    return Loader(source, transform, order, BatchStream(dataset, data_cfg))


def _check_length(order: EpochOrder, split: str) -> None:
    if order.num_samples < order.world_size:
        raise DataError(
            f"config.DATA.{split} has {order.num_samples} images for {order.world_size} processes. "
            f"Set config.DISTRIBUTED.NUM_PROC_PER_NODE to at most {order.num_samples}, or add images."
        )
    step = order.micro_batch * order.accumulation_steps
    if not order.num_kept:
        raise DataError(
            f"config.DATA.{split} has {order.num_samples} images, less than one step of {step}, and DROP_LAST drops "
            f"them all. Set config.DATA.{split}.DROP_LAST=False or lower config.DATA.{split}.BATCHSIZE_PER_REPLICA."
        )
    dropped = order.num_samples - order.num_kept
    if dropped and not order.drop_last and order.rank == 0:
        logger.warning(
            "The last %d images of every epoch are left out: fewer than the %d processes.", dropped, order.world_size
        )
