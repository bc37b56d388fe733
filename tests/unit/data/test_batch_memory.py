"""Memory that batches travel in: never written while a tensor of it lives, used again afterward."""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.data.batch_memory import BatchReceiver, BatchSender, _mapped
from vissl_zero.data.dataset import ImageBatch, Loaded
from vissl_zero.data.loader import build_loader

SHAPE = (4, 3, 96, 96)


def batch_of(images: list[torch.Tensor]) -> Loaded:
    return Loaded(ImageBatch(images, [1] * len(images), None, torch.arange(4), 4))


class Sender(BatchSender):
    """A worker's side, and the training process's behind the same pair of sockets."""

    def __init__(self, ours: Connection, theirs: Connection):
        super().__init__(theirs)
        self.receiver = BatchReceiver(ours)

    def sent(self, answer: Any) -> Any:
        """What the training process gets."""
        self.send(answer)
        return self.receiver.receive()


def sent(sender: Sender, value: float, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """What the training process gets of a batch of equal pixels."""
    images: torch.Tensor = sender.sent(batch_of([sender.empty(shape).fill_(value)])).batch.images[0]
    return images


@pytest.fixture
def sender() -> Iterator[Sender]:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        sender = Sender(ours, theirs)
        sender.receiver.set_timeout(5.0)
        yield sender


def test_a_block_is_used_again_once_every_tensor_in_it_is_freed(sender: Sender) -> None:
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
    del third
    assert bool((sent(sender, 4.0) == 4).all())  # nothing of the third message is left in front of it


def test_an_array_of_a_tensor_keeps_its_block(sender: Sender) -> None:
    array = sent(sender, 1.0).numpy()[2:]
    for value in (2.0, 3.0):
        sent(sender, value)
    assert (array == 1).all()


def test_the_autograd_graph_keeps_a_block(sender: Sender) -> None:
    weight = torch.full(SHAPE, 2.0, requires_grad=True)
    product = (sent(sender, 3.0) * weight).sum()
    sent(sender, 4.0)
    product.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and bool((weight.grad == 3).all())


def test_a_larger_batch_takes_the_place_of_a_free_smaller_block(sender: Sender) -> None:
    sent(sender, 1.0)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    large = sent(sender, 2.0, (8, *SHAPE[1:]))
    assert len(sender._blocks) == 1 and bool((large == 2).all())
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open  # the small one's is closed
    del large
    kept = sent(sender, 3.0)
    assert len(sender._blocks) == 1 and bool((kept == 3).all())
    assert len(sender.receiver._blocks) == 1


def test_the_largest_free_block_makes_room_for_a_larger_one(sender: Sender) -> None:
    """The other still serves batches of its size."""
    small, medium = sent(sender, 1.0), sent(sender, 2.0, (5, *SHAPE[1:]))
    del small, medium
    large = sent(sender, 3.0, (8, *SHAPE[1:]))
    again = sent(sender, 4.0)
    assert len(sender._blocks) == 2 and bool((large == 3).all()) and bool((again == 4).all())
    assert [block.number for block in sender._blocks] == [1, 3]


@pytest.mark.parametrize("shape", [(2, 3), SHAPE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_memory_has_the_type_that_is_asked_for(sender: Sender, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert sender.empty(shape, dtype).dtype == dtype


def test_a_batch_that_could_not_be_loaded_gives_its_blocks_back(sender: Sender) -> None:
    for _ in range(3):
        sender.empty(SHAPE)
        assert sender.sent(Loaded(None, error="a broken image")).error == "a broken image"
    assert len(sender._blocks) == 1


@pytest.mark.parametrize("shape", [SHAPE, (0, 3, 96, 96), (2, 3, 4, 4)])
def test_tensors_made_elsewhere_and_small_ones_travel_too(sender: Sender, shape: tuple[int, ...]) -> None:
    images = [torch.randn(shape), torch.randn(shape).to(torch.float64)]
    batch = sender.sent(batch_of(list(images))).batch
    assert batch is not None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch.images, images, strict=True))
    assert torch.equal(batch.sample_ids, torch.arange(4))


def test_a_worker_that_stops_within_a_message_is_waited_for_no_longer_than_the_timeout(
    sender: Sender,
) -> None:
    sender.receiver.set_timeout(0.2)
    with pytest.raises(BlockingIOError):
        sender.receiver.receive()
    os.write(sender._connection.fileno(), struct.pack("!i", 10**6))  # its length, as it begins
    with pytest.raises(BlockingIOError):
        sender.receiver.receive()


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
    (receiver,) = loader._stream._receivers
    assert len(receiver._blocks) <= 6  # two in each direction, this one, and one in the making


def test_shared_memory_is_seen_as_its_bytes() -> None:
    descriptor = os.memfd_create("a test")
    try:
        os.write(descriptor, bytes(range(1, 6)))
        array = _mapped(descriptor)
        assert array.dtype == np.uint8 and array.tolist() == [1, 2, 3, 4, 5]
        array[0] = 9
        assert os.pread(descriptor, 9, 0) == bytes([9, 2, 3, 4, 5])
    finally:
        os.close(descriptor)
