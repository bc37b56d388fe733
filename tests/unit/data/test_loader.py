from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.errors import DataError

GLOBAL_BATCH = 8


def loaders(data: dict[str, Any], world_size: int, accumulation_steps: int = 1, seed: int = 1) -> list[Loader]:
    per_rank = GLOBAL_BATCH // world_size // accumulation_steps
    return [
        build_loader(data_block(data), "TRAIN", seed, per_rank, rank, world_size, accumulation_steps)
        for rank in range(world_size)
    ]


def samples(batches: list[ImageBatch]) -> dict[int, list[torch.Tensor]]:
    """Sample id -> its crops, over the micro-batches of all ranks."""
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            assert sample_id not in found
            found[sample_id] = [image[row :: batch.num_local] for image in batch.images]
    return found


def epoch_samples(ranks: list[Loader], epoch: int, start_sample: int = 0) -> list[dict[int, list[torch.Tensor]]]:
    """Per step, the samples that all ranks loaded together."""
    by_rank = [list(loader.epoch(epoch, start_sample)) for loader in ranks]
    return [
        samples([batch for ranks in zip(*step, strict=True) for batch in ranks]) for step in zip(*by_rank, strict=True)
    ]


def assert_same(a: list[dict[int, list[torch.Tensor]]], b: list[dict[int, list[torch.Tensor]]]) -> None:
    assert [list(step) for step in a] == [list(step) for step in b]
    for one, other in zip(a, b, strict=True):
        for sample_id, crops in one.items():
            assert all(torch.equal(x, y) for x, y in zip(crops, other[sample_id], strict=True))


def test_batches_are_crop_major_by_resolution(make_data: MakeData, photos: Path) -> None:
    (loader,) = loaders(make_data("disk_folder", photos), 1)
    steps = list(loader.epoch(0))
    assert len(steps) == loader.steps_per_epoch == 2
    first, last = steps[0][0], steps[1][0]
    assert [tuple(image.shape) for image in first.images] == [(16, 3, 12, 12), (24, 3, 8, 8)]
    assert first.num_crops == [2, 3]
    assert (first.num_local, first.num_global, last.num_local, last.num_global) == (8, 8, 3, 3)
    # Row j of a resolution is crop j // B of sample j % B: making the third sample alone gives the same rows.
    crops = samples([first])[int(first.sample_ids[2])]
    assert torch.equal(crops[0], first.images[0][[2, 10]])
    assert torch.equal(crops[1], first.images[1][[2, 10, 18]])


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_world_size_sees_the_same_pixels(make_data: MakeData, photos: Path, world_size: int) -> None:
    data = make_data("disk_folder", photos, DATA_LIMIT=10 if world_size == 2 else 8)
    assert_same(epoch_samples(loaders(data, world_size), 3), epoch_samples(loaders(data, 1), 3))


def test_any_number_of_workers_makes_the_same_pixels(make_data: MakeData, photos: Path) -> None:
    (here,) = loaders(make_data("disk_folder", photos), 1)
    (workers,) = loaders(make_data("disk_folder", photos, num_workers=2), 1)
    next(iter(workers.epoch(7)))  # an epoch left half-way must not disturb the next
    for epoch in (0, 1):
        assert_same(epoch_samples([workers], epoch), epoch_samples([here], epoch))


def test_accumulation_makes_the_pixels_of_the_large_batch(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos)
    accumulated = loaders(data, 2, accumulation_steps=2)
    assert [len(step) for step in accumulated[0].epoch(0)] == [2, 1]
    assert_same(epoch_samples(accumulated, 0), epoch_samples(loaders(data, 1), 0))


def test_an_epoch_resumes_at_a_sample(make_data: MakeData, photos: Path) -> None:
    (loader,) = loaders(make_data("disk_folder", photos), 1)
    assert_same(epoch_samples([loader], 0, start_sample=8), epoch_samples([loader], 0)[1:])


def test_augmentations_change_with_epoch_and_seed_and_no_other_way(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos)
    (loader,), (other,) = loaders(data, 1), loaders(data, 1, seed=2)
    first, again, later = (epoch_samples([loader], epoch)[0] for epoch in (0, 0, 1))
    assert_same([first], [again])
    for different in (later, epoch_samples([other], 0)[0]):
        shared = set(first) & set(different)
        assert shared
        assert not any(torch.equal(first[i][0], different[i][0]) for i in shared)


def test_loading_leaves_the_random_numbers_of_the_process_alone(make_data: MakeData, photos: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    (loader,) = loaders(make_data("disk_folder", photos), 1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    list(loader.epoch(0))
    assert draw() == expected


def test_labels_come_with_their_images(make_data: MakeData, photos: Path) -> None:
    (loader,) = loaders(make_data("disk_folder", photos), 1)
    for step in loader.epoch(0):
        assert step[0].targets is not None
        assert step[0].targets.tolist() == [int(i >= 6) for i in step[0].sample_ids.tolist()]
    (by_index,) = loaders(make_data("disk_folder", photos, LABEL_TYPE="sample_index"), 1)
    batch = next(by_index.epoch(0))[0]
    assert batch.targets is not None and torch.equal(batch.targets, batch.sample_ids)
    (zero,) = loaders(make_data("disk_folder", photos, LABEL_TYPE="zero"), 1)
    batch = next(zero.epoch(0))[0]
    assert batch.targets is not None and batch.targets.tolist() == [0] * 8
    (unlabeled,) = loaders(make_data("disk_folder", photos / "a"), 1)
    assert next(unlabeled.epoch(0))[0].targets is None


def test_a_batch_moves_and_changes_dtype(make_data: MakeData, photos: Path) -> None:
    (loader,) = loaders(make_data("disk_folder", photos), 1)
    batch = next(loader.epoch(0))[0]
    moved = batch.to("cpu", torch.float64)
    assert {image.dtype for image in moved.images} == {torch.float64}
    assert moved.sample_ids.dtype == torch.int64
    assert torch.equal(moved.images[0].float(), batch.images[0])


def test_fewer_images_than_ranks_is_refused(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos, DATA_LIMIT=3)
    with pytest.raises(DataError, match="has 3 images for 4 processes"):
        build_loader(data_block(data), "TRAIN", 0, 1, 0, 4, 1)


def test_drop_last_that_drops_everything_is_refused(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos, DROP_LAST=True)
    with pytest.raises(DataError, match="11 images, less than one step of 16"):
        build_loader(data_block(data), "TRAIN", 0, 16, 0, 1, 1)


def test_a_dropped_tail_is_said_once(make_data: MakeData, photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaders(make_data("disk_folder", photos), 4)
    assert caplog.messages == ["The last 3 images of every epoch are left out: fewer than the 4 processes."]
