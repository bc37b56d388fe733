"""Memory of optimizer state that a checkpoint fills."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.sharding.engines.fairscale.flat_sharded import FlatShard
from vissl_zero.sharding.engines.fairscale.strategy import _OwnedShard
from vissl_zero.sharding.offload.parameter_store import DiskShard, HostShard, host_shard
from vissl_zero.sharding.state.shard import RowShard, Shard, divide_by_norms, empty_state, row_shards


def test_state_lies_in_memory_as_its_parameter_does():
    """Fused kernels walk through both together, in the order of memory."""
    kernel = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    same = empty_state(kernel, (4, 3, 2, 2), torch.float64)
    assert (same.stride(), same.dtype) == (kernel.stride(), torch.float64)
    for shape in ((), (4,), (4, 1, 1, 1)):  # a counter, a row of Adafactor's
        assert empty_state(kernel, shape, None).shape == shape


def test_state_of_a_shard_on_disk_is_in_host_memory():
    meta = torch.zeros(3, 2, device="meta")
    for shape in ((3, 2), (3,)):
        assert (state := empty_state(meta, shape, torch.float32)).device.type == "cpu" and state.shape == shape


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_gradient_is_changed_at_once_or_noted_for_the_update(is_noted: bool) -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    param.grad = torch.tensor([10.0, 20.0])
    shard = Shard("w", param, param, param.shape, noted=[] if is_noted else None)
    shard.change_grad(0.5)
    shard.change_grad(2.0, torch.tensor(3.0))
    assert shard.grad().tolist() == ([10.0, 20.0] if is_noted else [13.0, 26.0])
    assert shard.noted == ([(0.5, None), (2.0, torch.tensor(3.0))] if is_noted else None)


def test_a_master_copy_on_the_host_and_the_rows_on_the_device_change_together() -> None:
    rows = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    shard = host_shard(Shard("w", rows, rows, rows.shape), pin=False)
    assert shard.local.equal(rows) and shard.held().data_ptr() == rows.data_ptr() != shard.local.data_ptr()
    shard.normalize_rows()
    torch.testing.assert_close(rows.detach(), torch.tensor([[0.6, 0.8]]))
    shard.assign(torch.tensor([[1.0, 2.0]]))
    assert rows.tolist() == shard.local.tolist() == [[1.0, 2.0]]
    shard.take_over(torch.tensor([[5.0, 6.0]]))  # the loop has written them into the source itself
    assert (rows.tolist(), shard.local.tolist()) == ([[1.0, 2.0]], [[5.0, 6.0]])


def test_rows_are_normalized_as_torch_normalizes_them() -> None:
    rows = torch.tensor([[3.0, 4.0], [3e-13, 4e-13], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.nn.functional.normalize(rows, dim=1)
    divide_by_norms(rows)
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [Shard, RowShard, DiskShard, HostShard, FlatShard, _OwnedShard])
def test_shards_are_told_apart_by_identity(kind: type[Shard]) -> None:
    """Their tensors have no one truth value."""
    assert kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


def test_one_view_of_a_parameter_keeps_its_values_where_the_loop_sets_others() -> None:
    model = nn.Linear(3, 2, bias=False)
    (shard,) = row_shards(model, {"weight"}, num_ranks=1, rank=0)
    before = model.weight.detach().clone()
    view = model.weight.data.view(-1)
    model.weight.data = torch.zeros(2, 3)
    assert view.equal(before.view(-1)) and not shard.local.any()
