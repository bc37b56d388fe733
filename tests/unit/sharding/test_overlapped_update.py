"""An update on the host and its copies to the device beside it: same bits, and each wait is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.dist.delayed_streams import Stream, Streams
from vissl_zero.sharding.offload.parameter_store import HostShard, host_shard
from vissl_zero.sharding.state.shard import whole_shard
from vissl_zero.sharding.update.overlapped_update import overlapped_update

SHAPES = ((5, 3), (17,), (2, 40), (1,))
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def _trained(
    streams: Streams | None, build: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["AdamW"]
) -> list[Tensor]:
    """What the device's work has read of its rows in each of four steps."""
    generator = torch.Generator().manual_seed(0)
    shards: list[HostShard] = []
    for index, shape in enumerate(SHAPES):
        source = nn.Parameter(torch.randn(shape, generator=generator))
        shards.append(host_shard(whole_shard(f"p{index}", source), pin=False))
    optimizer = build([{"params": [shard.local for shard in half]} for half in (shards[::2], shards[1::2])])
    read: list[Tensor] = []

    def read_rows() -> None:
        read.append(torch.cat([shard.on_device.flatten() for shard in shards]))

    with nullcontext() if streams is None else streams.present():
        update = overlapped_update(optimizer, shards)
        assert (update is None) is (streams is None)
        for step in range(4):
            for shard in shards[: len(shards) - step % 2]:  # in some steps the last has no gradient
                shard.local.grad = torch.randn(shard.local.shape, generator=generator)
            if update is None:
                optimizer.step()
                for shard in shards:
                    shard.publish()
            else:
                update.run()
            if streams is None:
                read_rows()
            else:
                streams.main.put(read_rows)
            optimizer.zero_grad()
        if streams is not None:
            streams.main.run()
    return read


def _is_equal(streams: Streams) -> bool:
    return all(map(torch.equal, _trained(streams), _trained(None)))


def _orders() -> list[Streams]:
    return [Streams(is_main_late, is_side_late) for is_main_late in (True, False) for is_side_late in (True, False)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_device_reads_the_same_bits_in_whatever_order_streams_run(name):
    expected = _trained(None, OPTIMIZERS[name])
    for streams in _orders():
        found = _trained(streams, OPTIMIZERS[name])
        assert len(found) == 4
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("wait", ["wait_stream", "synchronize"])
def test_without_one_of_the_waits_the_device_reads_wrong_rows(wait):
    with patch.object(Stream, wait, lambda *_: None):
        assert not all(map(_is_equal, _orders()))


def test_a_piece_is_on_its_way_while_the_next_is_updated():
    events: list[str] = []
    put, step = Stream.put, torch.optim.AdamW.step

    def note_copy(stream, work):
        events.append("copy" if stream is streams.side else "work")
        put(stream, work)

    def note_step(optimizer, *arguments):
        events.append("update")
        return step(optimizer, *arguments)

    streams = Streams(True, True)
    with patch.object(Stream, "put", note_copy), patch.object(torch.optim.AdamW, "step", note_step):
        _trained(streams)
    one_step = ["update", "copy"] * len(SHAPES) + ["work"] * 2  # the wait, and what reads
    assert events == one_step * 4


def test_an_optimizer_that_is_not_known_updates_all_at_once():
    class Coupled(torch.optim.SGD):
        def step(self, closure=None):
            params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
            norm = torch.nn.utils.get_total_norm([param.grad for param in params])
            for param in params:
                param.grad /= norm
            return super().step(closure)

    build = partial(Coupled, lr=0.1)
    assert all(map(torch.equal, _trained(Streams(True, True), build), _trained(None, build)))
