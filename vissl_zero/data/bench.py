"""The cost of loading an image, by part; whether training will wait for images, and what to change."""

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
_WARM_UP = 8  # images: the first ones import codecs and fill caches
_MUCH = 0.3  # share of an image's time that is worth advice
T = TypeVar("T")


@dataclass(frozen=True)
class LoadingCost:
    """The cost of an image on one core.

    Attributes:
        num_images: number of measured images.
        num_broken: number of broken images, which are not measured.
        seconds: part -> seconds per image: read, decode, each transform, collate. Reading is wall-clock time, the rest
            processor time.
    """

    num_images: int
    num_broken: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds per image."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return a part's share of the time, 0 to 1."""
        return self.seconds[part] / self.total


class _Clock:
    """Sums the seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str, work: Callable[[], T], now: Callable[[], float] = time.process_time) -> T:
        begun = now()
        done = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + now() - begun
        return done


def measure(data: Data, seed: int, batch: int, num_images: int) -> LoadingCost:
    """Measure the loading of TRAIN's images in the order of an epoch, in this process, on one core.

    Args:
        data: the resolved DATA block.
        seed: SEED_VALUE.
        batch: images per micro-batch.
        num_images: largest number of images to measure.
    Raises:
        ConfigError, DataError: as ``build_loader``; also if no image can be read.
    """
    source, pipeline = build_source(data, "TRAIN", seed), build_split_pipeline(data, "TRAIN")
    decoder, threads = Decoder.of(data), torch.get_num_threads()
    order = shuffled(len(source), seed, 0).tolist()
    ids = order[:num_images]
    torch.set_num_threads(1)  # as in a worker
    try:
        with borrowed_randomness():
            # The last images of the order, so that those that are measured are not in the page cache yet.
            _load(source, pipeline, decoder, seed, order[-_WARM_UP:], _Clock())
            clock, kept = _Clock(), 0
            for start in range(0, len(ids), batch):
                kept += _load(source, pipeline, decoder, seed, ids[start : start + batch], clock)
    finally:
        torch.set_num_threads(threads)
    if not kept:
        raise DataError(f"None of {len(ids):,} images can be used; see vissl-zero data check.")
    seconds = {name: spent / kept for name, spent in clock.seconds.items()}
    return LoadingCost(kept, len(ids) - kept, seconds)


def _load(source: Source, pipeline: Pipeline, decoder: Decoder, seed: int, ids: Sequence[int], clock: _Clock) -> int:
    """Load a micro-batch, and return the number of images that are not broken."""
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
    # Wall-clock time: a process that waits for a disk uses no processor time.
    file = clock(READ, lambda: encoded_image(source, index), time.perf_counter)
    crops = [clock(DECODE, lambda: pipeline.open(file, source.name(index), decoder))]
    seed_sample(seed, 0, index)
    for transform in pipeline.transforms:
        crops = clock(type(transform).__name__, lambda: pipeline.step(transform, crops))  # noqa: B023 - called here
    return clock(COLLATE, lambda: pipeline.finished(crops))


@dataclass(frozen=True)
class Supply:
    """The rate of a rank's loader, against the images that a step needs.

    Attributes:
        images_per_step: images per rank and step.
        workers: NUM_DATALOADER_WORKERS.
        cores: cores of this machine per rank.
        seconds: core seconds per image.
    """

    images_per_step: int
    workers: int
    cores: int
    seconds: float

    @property
    def rate(self) -> float:
        """Images per second and rank; workers beyond the number of cores add nothing."""
        return max(1, min(self.workers, self.cores)) / self.seconds

    @property
    def step_seconds(self) -> float:
        """Seconds to load the images of a step."""
        return self.images_per_step / self.rate

    def data_wait(self, step_seconds: float) -> float:
        """Return the share of time that training waits for images, if the rest of a step takes ``step_seconds``."""
        # Without workers, loading and computing take turns; with workers they overlap.
        if not self.workers:
            return self.step_seconds / (self.step_seconds + step_seconds)
        return max(0.0, 1 - step_seconds / self.step_seconds)

    def workers_for(self, step_seconds: float) -> int:
        """Return the number of workers, with a core each, that load a step's images in ``step_seconds``."""
        return max(1, math.ceil(self.images_per_step * self.seconds / step_seconds))


def supply_of(plan: ResolvedRun, cost: LoadingCost) -> Supply:
    """Return the supply of a rank of the run, on machines like this one."""
    ranks = max(1, plan.world_size // plan.num_nodes)
    # The process's own cores: a container or a batch system may give it a part of the machine.
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    images = plan.batch_per_rank * plan.accumulation_steps
    return Supply(images, plan.config.DATA.NUM_DATALOADER_WORKERS, cores, cost.total)


def advice(data: Data, cost: LoadingCost, supply: Supply, step_seconds: float | None) -> list[str]:
    """Return sentences with changes that make training wait less, the most useful first; none if it does not wait.

    Args:
        data: the resolved DATA block.
        cost: cost of an image.
        supply: supply of a rank.
        step_seconds: seconds of a step without loading; None: not known.
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
