"""A micro-batch in parts, and whole again."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vissl_zero.data import dataset
from vissl_zero.data.dataset import BY_CROP, BY_SAMPLE, ImageBatch, join_batches

_TENSORS_BESIDE = {*BY_SAMPLE, *BY_CROP}


def batch() -> ImageBatch:
    """Five samples with two large crops and one small; what a row holds says its crop and its sample."""
    rows = {
        crops: torch.stack([torch.tensor([crop, sample]) for crop in range(crops) for sample in range(5)])
        for crops in (1, 2, 3)
    }
    return ImageBatch(
        images=[rows[2].view(10, 2, 1, 1).float(), rows[1].view(5, 2, 1, 1).float()],
        num_crops=[2, 1],
        targets=torch.arange(5) % 2,
        sample_ids=torch.arange(10, 15),
        num_global=9,
        stand_ins=(1, 4),
        masks=torch.arange(5, dtype=torch.uint8).view(5, 1, 1),
        boxes=rows[3].float().repeat(1, 2),
    )


def same(first: ImageBatch, second: ImageBatch) -> bool:
    for field in fields(ImageBatch):
        a, b = getattr(first, field.name), getattr(second, field.name)
        parts = list(zip(a, b, strict=True)) if field.name == "images" else [(a, b)]
        if not all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in parts):
            return False
    return True


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 1, 4, 5), (0, 0, 5)])
def test_parts_join_to_the_whole(cuts: tuple[int, ...]) -> None:
    whole = batch()
    parts = [whole.take(first, last) for first, last in itertools.pairwise(cuts)]
    assert [part.num_local for part in parts] == [last - first for first, last in itertools.pairwise(cuts)]
    assert same(join_batches(parts, whole.num_global), whole)


def test_a_part_has_the_rows_of_its_samples() -> None:
    part = batch().take(1, 3)
    assert part.images[0].flatten(1).tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    assert part.boxes is not None and part.boxes[:, 1].tolist() == [1, 2] * 3
    assert part.sample_ids.tolist() == [11, 12] and part.stand_ins == (0,)


def test_what_a_source_does_not_have_stays_away() -> None:
    bare = replace(batch(), targets=None, masks=None, boxes=None)
    assert list(bare.beside) == ["sample_ids"]
    assert same(join_batches([bare.take(0, 3), bare.take(3, 5)], 9), bare)


def test_every_tensor_is_moved() -> None:
    """A field added without its row in BY_SAMPLE or BY_CROP would stay behind on the processor."""
    typed = {field.name for field in fields(ImageBatch) if "Tensor" in str(field.type)}
    assert typed == {"images", *_TENSORS_BESIDE}
    moved = batch().to("meta", torch.float64)
    assert {tensor.device.type for tensor in moved.tensors} == {"meta"} and moved.images[0].dtype == torch.float64


class _Copying:
    """A pipeline that copies a crop into its row, and notes which."""

    def __init__(self) -> None:
        self.written: list[float] = []

    def rows(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def write(self, crop: torch.Tensor, row: torch.Tensor) -> None:
        self.written.append(crop.flatten()[0].item())
        row.copy_(crop)


def test_crops_wait_for_as_many_samples_as_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_CACHED_VALUES", 15)  # two samples of 4 + 1 + 1 values each, and a half
    pipeline: Any = _Copying()
    samples = [[torch.full(shape, 10.0 * n + at) for at, shape in enumerate([(4,), (1,), (1,)])] for n in range(5)]
    rows = dataset._Rows(pipeline, samples[0], len(samples), torch.zeros)
    counts = []
    for crops in samples:
        rows.append(crops)
        counts.append(len(pipeline.written))
    assert counts == [0, 6, 6, 12, 12] and pipeline.written[:6] == [0, 10, 1, 11, 2, 12]  # crop by crop
    rows.flush()
    assert len(pipeline.written) == 15
    first = [image[:, 0].tolist() for image in rows.images]
    assert first == [[0, 10, 20, 30, 40], [1, 11, 21, 31, 41, 2, 12, 22, 32, 42]]
