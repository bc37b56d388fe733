"""Parameters and gradients on a disk: they come back as they went, and nothing that changed is trained on."""

from __future__ import annotations

import os
from itertools import islice

import pytest
import torch

from vissl_zero.sharding.offload import layout
from vissl_zero.sharding.offload.block_file import OffloadError, OffloadFolder, PrefetchOrder
from vissl_zero.sharding.offload.layout import StoredParam
from vissl_zero.sharding.offload.parameter_store import DiskShard, ParameterStore, disk_shard
from vissl_zero.sharding.offload.state_place import StateOnDisk, UpdateKernel
from vissl_zero.sharding.state.missing_gradient import ON_DISK
from vissl_zero.sharding.state.shard import Shard, squared_norms

SIZES = ((5000, 3), (0, 2048, 7), (9000,))


@pytest.fixture(autouse=True)
def _small_records(monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_ELEMENTS", 1024)


def _store(path, is_fast_init=True):
    count = iter(range(100))
    units = [[StoredParam(f"p{next(count)}", size, torch.float32, size != 7) for size in unit] for unit in SIZES]
    return ParameterStore(units, OffloadFolder(str(path), "vissl-zero-1", rank=0), is_fast_init)


def _values(store, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(param.num_elements, generator=generator) for i, param in enumerate(store.layout.params)}


def _fetch(store, unit):
    params = store.layout.params
    chosen = {segment.tensor for r in store.layout.unit_records[unit] for segment in store.layout.chunks[r].segments}
    outs = {index: torch.full((params[index].num_elements,), torch.nan) for index in chosen}
    store.fetch(unit, outs)
    return outs


def _equal(found, expected):
    return all(torch.equal(found[index], expected[index]) for index in found)


def test_units_come_back_in_any_order_and_after_a_change_of_one_shard(tmp_path):
    store = _store(tmp_path)
    values = _values(store)
    store.write(values)
    for unit in (0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 0, 2):  # expected, and not as expected
        assert _equal(_fetch(store, unit), values)
    values[1] = torch.arange(3.0)
    store.write({1: values[1]})  # shares its record with a piece of another
    for unit in (0, 1, 2):
        assert _equal(_fetch(store, unit), values)
    assert all(torch.equal(store.read(index), value) for index, value in values.items())
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_what_came_next_in_the_last_step_is_read_ahead(tmp_path):
    store = _store(tmp_path)
    store.write(_values(store))
    for unit in (0, 1, 2, 2, 1, 0):
        _fetch(store, unit)
    with store.updating():
        assert store._ahead.expected == [], "what was read before an update is out of date after it"
    expected = [record for unit in (0, 1, 2) for record in store.layout.unit_records[unit]]
    assert store._ahead.expected[: len(expected)] == expected
    _fetch(store, 0)
    assert store._ahead.expected[:3] == list(store.layout.unit_records[1])[:3]
    store.close()


def test_gradients_add_up_change_and_are_forgotten(tmp_path):
    store = _store(tmp_path)
    values, first, second = (_values(store, seed) for seed in range(3))
    gradients = store.gradients
    gradients.add({0: first[0]})
    gradients.add({0: second[0], 1: first[1]})  # 1 shares a record with a piece of 0
    assert [index in gradients for index in (0, 1, 3)] == [True, True, False]
    assert torch.equal(gradients.read(0), first[0] + second[0])
    assert torch.equal(gradients.read(1), first[1])
    gradients.change(1, 0.5)
    assert not gradients.needs_values(1)
    gradients.change(1, torch.tensor(2.0), torch.tensor(3.0))
    assert gradients.needs_values(1) and not gradients.needs_values(0)
    torch.testing.assert_close(gradients.read(1, values[1]), first[1] * 0.5 * 2 + values[1] * 3)
    gradients.add({3: first[3]})
    gradients.forget(3)
    gradients.set_zero(3)  # in the file it is still that of the step before
    assert not gradients.read(3).any()
    for index in (0, 1, 3):
        gradients.forget(index)
    gradients.add({0: second[0]})
    assert 1 not in gradients and 3 not in gradients
    gradients.add({1: second[1], 3: second[3]})  # neither changed nor zero, as those before them were
    assert all(torch.equal(gradients.read(index), second[index]) for index in (0, 1, 3))
    store.close()


def test_the_norm_of_a_gradient_is_known_while_it_is_that_of_one_backward_pass(tmp_path):
    store = _store(tmp_path)
    first, second = (_values(store, seed) for seed in range(2))
    gradients = store.gradients
    gradients.add({0: first[0], 1: first[1], 2: first[2], 5: first[5]})
    for index in (0, 1, 2, 5):  # 2 is empty
        assert torch.equal(gradients.square(index), squared_norms([gradients.read(index)])[0])
    gradients.add({0: second[0]})
    gradients.change(1, 0.5)
    gradients.set_zero(2)
    gradients.forget(5)
    assert [gradients.square(index) for index in (0, 1, 2, 5)] == [None] * 4, "what is read is another gradient now"
    gradients.add({5: second[5]})
    assert torch.equal(gradients.square(5), squared_norms([gradients.read(5)])[0])
    store.close()


def test_a_gradient_that_could_not_be_stored_is_never_trained_on(tmp_path, monkeypatch):
    store = _store(tmp_path)
    store.write(_values(store))

    def fail(*_):
        raise OffloadError("full")

    monkeypatch.setattr(store.gradients.records, "write", fail)
    store.add_grads({1: _values(store)[1]})  # one record: it is stored while backward goes on
    for call in (
        lambda: next(store.updating().gen),
        lambda: store.add_grads({1: _values(store)[1]}),
        lambda: store.read(1),
        lambda: _fetch(store, 0),
    ):
        with pytest.raises(OffloadError, match=r"full|failed earlier"):
            call()
    store.close()


def test_frozen_parameters_take_no_room_for_gradients(tmp_path):
    store = _store(tmp_path)
    records = [store.layout.is_trained(record) for record in range(len(store.layout.chunks))]
    assert records.count(False) == 1
    assert store.gradients.records.num_bytes == store.parameters.num_bytes - os.sysconf("SC_PAGE_SIZE")
    store.close()


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 8192), lambda path: path.write_bytes(bytes(80000))])
def test_nothing_is_trained_on_a_file_that_changed(damage, tmp_path):
    store = _store(tmp_path)
    values = _values(store)
    store.write(values)
    store.gradients.add(values)
    damage(next(tmp_path.rglob("parameters")))
    with pytest.raises(OffloadError, match="Resume from the last checkpoint"):
        _fetch(store, 2)
    damage(next(tmp_path.rglob("gradients")))
    with pytest.raises(OffloadError, match="Resume from the last checkpoint"):
        store.gradients.read(5)
    store.close()


def test_after_an_update_that_failed_nothing_is_read(tmp_path):
    store = _store(tmp_path)
    store.write(_values(store))
    with pytest.raises(ZeroDivisionError), store.updating():
        raise ZeroDivisionError
    for call in (
        lambda: _fetch(store, 0),
        lambda: store.read(0),
        lambda: store.write({}),
        lambda: store.add_grads({}),
        lambda: next(store.updating().gen),
    ):
        with pytest.raises(OffloadError, match="failed earlier"):
            call()
    store.close()


def test_the_order_of_a_step_is_expected_in_the_next():
    order = PrefetchOrder()
    step = [0, 1, 2, 2, 1, 0] * 2  # forward and backward of two micro-batches
    for unit in step:
        order.came(unit)
    order.restart()
    assert list(islice(order.expected(), 12)) == step
    order.came(0)
    order.came(2)  # never came after 0 before
    assert list(islice(order.expected(), 5)) == []


def test_a_shard_on_a_disk_reads_and_writes_its_record(tmp_path):
    store = _store(tmp_path)
    store.write(_values(store))
    meta = torch.nn.Parameter(torch.empty(3, 1, device="meta"))
    in_memory = Shard("p1", meta, meta, meta.shape)
    assert disk_shard(in_memory, None) is in_memory and not in_memory.is_on_disk
    kept = Shard("kept", meta, meta, meta.shape)
    assert disk_shard(kept, store) is kept  # one that is not in the store
    shard = disk_shard(in_memory, store)
    assert isinstance(shard, DiskShard) and shard.is_on_disk and (shard.name, shard.index) == ("p1", 1)
    shard.assign(torch.tensor([[3.0], [-4.0], [0.5]], dtype=torch.float64))
    assert shard.values().tolist() == [[3.0], [-4.0], [0.5]] and store.read(1).dtype == torch.float32
    shard.normalize_rows()
    torch.testing.assert_close(shard.values(), torch.tensor([[1.0], [-1.0], [1.0]]))
    shard.take_over(torch.full((3, 1), 2.0))
    assert shard.values().tolist() == [[2.0]] * 3
    shard.take_grad()
    assert shard.missing_gradient() is None and shard.local.grad is None
    shard.set_zero_grad()
    assert shard.missing_gradient() == ON_DISK and shard.local.grad is not None and shard.local.grad.is_meta
    shard.change_grad(1.0, torch.tensor(0.5))
    assert shard.grad().tolist() == [[1.0]] * 3
    shard.forget_grad()
    assert shard.missing_gradient() is None and shard.local.grad is None
    assert store.disk_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.close()


def test_a_rank_without_elements_has_files_of_nothing(tmp_path):
    for name in ("parameters", "state"):
        (tmp_path / name).mkdir()
    store = ParameterStore([], OffloadFolder(str(tmp_path / "parameters"), "vissl-zero-1", rank=0), is_fast_init=True)
    kernel = UpdateKernel(torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))]))
    folder = OffloadFolder(str(tmp_path / "state"), "vissl-zero-1", rank=0)
    state = StateOnDisk([], kernel, [], folder, is_fast_init=True)
    assert store.record_bytes == state.record_bytes == 0
