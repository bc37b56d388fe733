"""Memory of optimizer state that a checkpoint fills."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.engines.fairscale.flat_sharded import FlatShard
from vissl_zero.sharding.engines.fairscale.strategy import _OwnedShard
from vissl_zero.sharding.offload.parameter_store import DiskShard, HostShard, host_shard
from vissl_zero.sharding.state.shard import (
    RowShard,
    Shard,
    divide_by_norms,
    empty_state,
    row_shards,
    shards_of,
    squared_norms,
    whole_shard,
    with_zeros_for_empty,
)
from vissl_zero.sharding.state.teacher import WeightAverage


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


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(10.0).view(5, 2))
        self.number = nn.Parameter(torch.tensor(7.0))
        self.nothing = nn.Parameter(torch.zeros(3, 0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.others = nn.Parameter(torch.ones(2))


def test_rows_are_cut_in_equal_chunks_the_last_ones_shorter() -> None:
    model = _Model()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    trained = set(values) - {"others"}
    ranks = [{shard.name: shard for shard in row_shards(_Model(), trained, 3, rank)} for rank in range(3)]
    places = [(0, [[0.0, 1.0], [2.0, 3.0]]), (4, [[4.0, 5.0], [6.0, 7.0]]), (8, [[8.0, 9.0]])]
    assert [(rank["matrix"].first_element, rank["matrix"].local.tolist()) for rank in ranks] == places
    assert [(rank["number"].first_element, rank["number"].local.tolist()) for rank in ranks] == [
        (0, [7.0]),
        (1, []),
        (1, []),
    ]
    for rank, shards in enumerate(ranks):
        assert [shards[name].is_held_whole for name in trained] == [True] * 4
        for name in ("frozen", "others"):
            shard = shards[name]
            assert not isinstance(shard, RowShard) and shard.local is shard.source
            assert shard.contributes_to_norm == (rank == 0)
        matrix = shards["matrix"]
        assert isinstance(matrix, RowShard) and (matrix.row_numel, matrix.padded_numel) == (2, 4)
        assert [matrix.span(k) for k in range(3)] == [(0, 4), (4, 8), (8, 10)]
        assert matrix.held().equal(values["matrix"]) and matrix.held_shape() == (5, 2)
        matrix.assign(torch.full_like(matrix.local, -1.0))
        assert (matrix.held() == -1.0).sum() == matrix.local.numel(), "a view"
        matrix.normalize_rows()
        torch.testing.assert_close(matrix.held().norm(dim=1), torch.ones(5))


def test_rows_without_messages_take_their_part_of_the_full_gradient() -> None:
    model = _Model()
    shards = {shard.name: shard for shard in row_shards(model, {"matrix"}, 3, 1)}
    matrix = shards["matrix"]
    assert matrix.local_grad() is None
    model.matrix.grad = torch.arange(10.0).view(2, 5).t()  # in another order of memory
    matrix.take_grad()
    assert matrix.local.grad is not None and matrix.local.grad.tolist() == [[2.0, 7.0], [3.0, 8.0]]
    matrix.forget_grad()
    assert matrix.local.grad is None and model.matrix.grad is None
    matrix.reduced = torch.ones(2, 2)
    matrix.take_grad()
    assert matrix.local.grad is matrix.reduced
    reduced = matrix.reduced
    matrix.drop_grad()
    assert not reduced.any() and matrix.reduced is None, "further messages add to zeros"


def test_a_whole_parameter_is_its_own_shard() -> None:
    model = _Model()
    shards = {shard.name: shard for shard in shards_of(model, None)}
    assert list(shards) == [name for name, _ in model.named_parameters()]
    shard = shards["matrix"]
    assert (shard.contributes_to_norm, shard.num_copies, shard.copy) == (True, 1, 0)
    assert not whole_shard("w", model.matrix, contributes_to_norm=False).contributes_to_norm
    assert whole_shard("w", model.matrix).contributes_to_norm
    shard.set_zero_grad()
    assert shard.grad().tolist() == [[0.0, 0.0]] * 5 and shard.known_square() is None
    shard.take_grad()
    assert shard.grad() is model.matrix.grad
    shard.forget_grad()
    assert model.matrix.grad is None
    assert shard.full_tensor().data_ptr() == shard.values().data_ptr() == model.matrix.data_ptr()


def test_norms_of_shards_count_empty_ones_as_zero() -> None:
    none, two, big = torch.zeros(0, 3), torch.tensor([3.0, 4.0]), torch.full((4,), 2.0**15, dtype=torch.float16)
    found = squared_norms([none, two, none, big])
    assert found.dtype == torch.float32 and found.tolist() == [0.0, 25.0, 0.0, 2.0**32]
    assert squared_norms([none]).tolist() == [0.0] and squared_norms([]).tolist() == []
    assert squared_norms([two, two.double()]).dtype == torch.float64
    stacked = with_zeros_for_empty([two, none, big], [torch.tensor(1.0), torch.tensor(2.0)], torch.float32)
    assert stacked.tolist() == [1.0, 0.0, 2.0]


def test_an_average_follows_and_changes_places_with_the_weights() -> None:
    weight, mean, count = nn.Parameter(torch.tensor([2.0])), torch.tensor([4.0]), torch.tensor(1)
    average = WeightAverage([whole_shard("w", weight)], {"mean": mean, "count": count})
    with torch.no_grad():
        weight.fill_(6.0)
    mean.fill_(8.0)
    count.fill_(5)
    average.update(0.75)
    assert (average.params["w"].item(), average.buffers["mean"].item(), average.buffers["count"].item()) == (
        3.0,
        5.0,
        5,
    )
    count.fill_(9)
    average.swap()
    assert (weight.item(), mean.item(), count.item()) == (3.0, 5.0, 5)
    assert (average.params["w"].item(), average.buffers["mean"].item(), average.buffers["count"].item()) == (
        6.0,
        8.0,
        9,
    )
    average.swap()
    average.update(0.0)
    assert (average.params["w"].item(), average.buffers["mean"].item()) == (6.0, 8.0)
    saved = {"w": {"local": torch.tensor([1.5])}}
    average.load(saved, {"mean": torch.tensor([2.5]), "count": torch.tensor(3)})
    assert (average.params["w"].item(), average.buffers["mean"].item(), average.buffers["count"].item()) == (
        1.5,
        2.5,
        3,
    )
    for params, buffers in ((saved, {}), ({}, average.buffers)):
        with pytest.raises(CheckpointError, match="running average is of another model"):
            average.load(params, buffers)
