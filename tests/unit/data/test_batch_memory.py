"""Memory that batches travel in: never written while a tensor of it lives, used again afterward."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.data import batch_memory
from vissl_zero.data.batch_memory import BatchSender, forget_blocks
from vissl_zero.data.dataset import ImageBatch, Loaded
from vissl_zero.data.loader import build_loader

SHAPE = (4, 3, 96, 96)


def batch_of(images: list[torch.Tensor]) -> Loaded:
    return Loaded(ImageBatch(images, [1] * len(images), None, torch.arange(4), 4))


def sent(sender: BatchSender, value: float, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """What the training process gets of a batch of equal pixels."""
    batch = sender.pack(batch_of([sender.empty(shape).fill_(value)])).unpack().batch
    assert batch is not None
    return batch.images[0]


@pytest.fixture
def sender(request: pytest.FixtureRequest) -> BatchSender:
    request.addfinalizer(lambda: forget_blocks(list(batch_memory._opened)))
    return BatchSender()


def test_a_block_is_used_again_once_every_tensor_in_it_is_freed(sender: BatchSender) -> None:
    first = sent(sender, 1.0)
    part = first[1:2].view(-1)  # another tensor with the same storage
    del first
    second = sent(sender, 2.0)
    assert len(sender._blocks) == 2
    assert bool((part == 1).all()) and bool((second == 2).all())
    del part
    third = sent(sender, 3.0)
    assert len(sender._blocks) == 2
    assert bool((second == 2).all()) and bool((third == 3).all())


def test_an_array_of_a_tensor_keeps_its_block(sender: BatchSender) -> None:
    array = sent(sender, 1.0).numpy()[2:]
    for value in (2.0, 3.0):
        sent(sender, value)
    assert (array == 1).all()


def test_the_autograd_graph_keeps_a_block(sender: BatchSender) -> None:
    weight = torch.full(SHAPE, 2.0, requires_grad=True)
    product = (sent(sender, 3.0) * weight).sum()
    sent(sender, 4.0)
    product.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and bool((weight.grad == 3).all())


def test_a_larger_batch_takes_the_place_of_a_free_smaller_block(sender: BatchSender) -> None:
    sent(sender, 1.0)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    large = sent(sender, 2.0, (8, *SHAPE[1:]))
    assert len(sender._blocks) == 1 and bool((large == 2).all())
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open  # the small one's is closed
    del large
    kept = sent(sender, 3.0)
    assert len(sender._blocks) == 1 and bool((kept == 3).all())
    (blocks,) = batch_memory._opened.values()
    assert len(blocks) == 1


def test_a_batch_that_could_not_be_loaded_gives_its_blocks_back(sender: BatchSender) -> None:
    for _ in range(3):
        sender.reclaim()
        sender.empty(SHAPE)
        assert sender.pack(Loaded(None, error="a broken image")).unpack().error == "a broken image"
    assert len(sender._blocks) == 1


@pytest.mark.parametrize("shape", [SHAPE, (0, 3, 96, 96), (2, 3, 4, 4)])
def test_tensors_made_elsewhere_and_small_ones_travel_too(sender: BatchSender, shape: tuple[int, ...]) -> None:
    images = [torch.randn(shape), torch.randn(shape).to(torch.float64)]
    batch = sender.pack(batch_of(list(images))).unpack().batch
    assert batch is not None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch.images, images, strict=True))
    assert torch.equal(batch.sample_ids, torch.arange(4))


@pytest.mark.timeout(120)
def test_a_held_batch_stays_as_it_is_while_a_worker_loads_on(make_data: MakeData, photos: Path) -> None:
    crop = [{"name": "RandomResizedCrop", "size": 96}, {"name": "ToTensor"}]
    loader = build_loader(
        data_block(make_data("disk_folder", photos, num_workers=1, TRANSFORMS=crop)), "TRAIN", 0, 4, 0, 1, 1
    )
    ((held,), *_) = list(loader.epoch(0))
    kept, view = held.images[0].clone(), held.images[0][-1]
    del held
    gc.collect()
    epochs = [[batch.images[0].mean() for (batch,) in loader.epoch(epoch)] for epoch in (1, 2, 3)]
    assert torch.equal(view, kept[-1])
    assert all(len(means) == 3 for means in epochs)
    (blocks,) = [batch_memory._opened[worker.pid] for worker in loader._stream._workers]
    assert len(blocks) <= 6  # two in each direction, this one, and one in the making
