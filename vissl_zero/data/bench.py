"""The cost of loading an image, part by part; whether training will wait for it, and what to change."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from vissl_zero.config.blocks.data import Data
from vissl_zero.data.dataset import borrowed_randomness, seed_sample, shuffled
from vissl_zero.data.decode import BrokenImageError, Decoder
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.data.source import Source, build_source, encoded_image
from vissl_zero.data.split_pipeline import build_split_pipeline
from vissl_zero.errors import DataError
from vissl_zero.resolve.fast_forms import refused
from vissl_zero.resolve.resolved import ResolvedRun

READ, DECODE, COLLATE = "read", "decode", "collate"
_WARM_UP = 8  # images
_MUCH = 0.3  # of the time of an image
T = TypeVar("T")


@dataclass(frozen=True)
class LoadingCost:
    """The cost of an image on one core.

    Attributes:
        num_images: number of images that were measured.
        num_broken: number of images that could not be used.
        seconds: part -> seconds an image: read, decode, each transform, collate. Reading is measured by the clock, the
            rest in processor time.
    """

    num_images: int
    num_broken: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds an image."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return a part's share of the time, 0 to 1."""
        return self.seconds[part] / self.total


class _Clock:
    """Adds up the seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str, work: Callable[[], T], now: Callable[[], float] = time.process_time) -> T:
        begun = now()
        done = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + now() - begun
        return done


def measure(data: Data, seed: int, batch: int, num_images: int) -> LoadingCost:
    """Load images of TRAIN in the order of an epoch, in this process, on one core.

    Args:
        data: the resolved DATA block.
        seed: SEED_VALUE.
        batch: images that are collated at a time.
        num_images: number of images to measure at most.
    Raises:
        ConfigError, DataError: as ``build_loader``; also where none of the images can be used.
    """
    source, pipeline = build_source(data, "TRAIN", seed), build_split_pipeline(data, "TRAIN")
    decoder, threads = Decoder.of(data), torch.get_num_threads()
    ids = shuffled(len(source), seed, 0).tolist()
    torch.set_num_threads(1)  # as a worker has it
    try:
        with borrowed_randomness():
            _load(source, pipeline, decoder, seed, ids[-_WARM_UP:], _Clock())
            clock, kept = _Clock(), 0
            for start in range(0, min(num_images, len(ids)), batch):
                part = ids[start : min(start + batch, num_images)]
                kept += _load(source, pipeline, decoder, seed, part, clock)
    finally:
        torch.set_num_threads(threads)
    if not kept:
        raise DataError(f"None of {min(num_images, len(ids)):,} images can be used; see vissl-zero data check.")
    seconds = {name: spent / kept for name, spent in clock.seconds.items()}
    return LoadingCost(kept, min(num_images, len(ids)) - kept, seconds)


def _load(source: Source, pipeline: Pipeline, decoder: Decoder, seed: int, ids: Sequence[int], clock: _Clock) -> int:
    """Load a micro-batch; returns its images."""
    samples: list[list[Any]] = []
    for index in ids:
        try:
            samples.append(_crops(source, pipeline, decoder, seed, index, clock))
        except BrokenImageError:
            continue
    by_shape: dict[Any, list[Any]] = {}
    for crop in (crop for sample in samples for crop in sample):
        by_shape.setdefault(tuple(crop.shape), []).append(crop)
    clock(COLLATE, lambda: [pipeline.stacked(crops) for crops in by_shape.values()])
    return len(samples)


def _crops(source: Source, pipeline: Pipeline, decoder: Decoder, seed: int, index: int, clock: _Clock) -> list[Any]:
    file = clock(READ, lambda: encoded_image(source, index), time.perf_counter)
    crops = [clock(DECODE, lambda: pipeline.open(file, source.name(index), decoder))]
    seed_sample(seed, 0, index)
    for transform in pipeline.transforms:
        crops = clock(type(transform).__name__, lambda: pipeline.step(transform, crops))  # noqa: B023 - called here
    return clock(COLLATE, lambda: pipeline.finished(crops))


@dataclass(frozen=True)
class Supply:
    """The rate of a rank's loader beside the rate that a step needs.

    Attributes:
        images_per_step: images that a rank takes in a step.
        workers: NUM_DATALOADER_WORKERS.
        cores: cores of this machine, for each of its ranks.
        seconds: seconds of a core for an image.
    """

    images_per_step: int
    workers: int
    cores: int
    seconds: float

    @property
    def rate(self) -> float:
        """Images a second for a rank; workers beyond the cores add nothing."""
        return max(1, min(self.workers, self.cores)) / self.seconds

    @property
    def step_seconds(self) -> float:
        """Time to load the images of a step."""
        return self.images_per_step / self.rate

    def data_wait(self, step_seconds: float) -> float:
        """Return the share of its time that training will wait, where all else of a step takes ``step_seconds``."""
        if not self.workers:
            return self.step_seconds / (self.step_seconds + step_seconds)
        return max(0.0, 1 - step_seconds / self.step_seconds)

    def workers_for(self, step_seconds: float) -> int:
        """Return how many workers, with a core each, load a step in ``step_seconds``."""
        return max(1, math.ceil(self.images_per_step * self.seconds / step_seconds))


def supply_of(plan: ResolvedRun, cost: LoadingCost) -> Supply:
    """Return what the loader of a rank of a run gives on a machine like this one."""
    ranks = max(1, plan.world_size // plan.num_nodes)
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    images = plan.batch_per_rank * plan.accumulation_steps
    return Supply(images, plan.config.DATA.NUM_DATALOADER_WORKERS, cores, cost.total)


def advice(data: Data, cost: LoadingCost, supply: Supply, step_seconds: float | None) -> list[str]:
    """Say what to change so that training waits less, in sentences, the most useful first; none where it never waits.

    Args:
        data: the resolved DATA block.
        cost: cost of an image.
        supply: supply of a rank.
        step_seconds: step seconds of all else that a step does; None: not known.
    """
    if step_seconds is not None and not supply.data_wait(step_seconds):
        return []
    sentences = []
    wanted = supply.cores if step_seconds is None else min(supply.cores, supply.workers_for(step_seconds))
    if wanted > supply.workers:
        there = "is 1 core" if supply.cores == 1 else f"are {supply.cores} cores"
        sentences.append(f"Write config.DATA.NUM_DATALOADER_WORKERS={wanted}: there {there} for each rank.")
    if data.BACKEND == "pil" and not refused(data.TRAIN.TRANSFORMS, "config.DATA.TRAIN.TRANSFORMS"):
        install = "" if find_spec("simplejpeg") and find_spec("cv2") else " (pip install vissl-zero[fast])"
        sentences.append(f"Write config.DATA.BACKEND=fast{install}: all transforms have a fast form.")
    if cost.share(READ) > _MUCH:
        sentences.append("Reading takes much of the time: pack the files on a local disk with vissl-zero data pack.")
    if cost.share(DECODE) > _MUCH:
        sentences.append("Decoding takes much of the time: reduce the images with vissl-zero data pack --size 512.")
    return sentences or ["Make fewer or smaller crops, or train where there are more cores for each rank."]
