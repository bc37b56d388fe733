"""Bytes by unique storage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vissl_zero.sharding import memory
from vissl_zero.sharding.memory import (
    ActivationCounter,
    Bytes,
    Storages,
    gradient_storages,
    is_out_of_memory,
    mapped_bytes,
    optimizer_storages,
    parameter_storages,
    peak_bytes,
    resident_bytes,
)
from vissl_zero.sharding.state.shard import Shard


def test_shared_and_released_memory_counts_once_and_not_at_all() -> None:
    base = torch.zeros(10)
    released = torch.zeros(10)
    released.untyped_storage().resize_(0)
    assert Storages([base, base[2:5], base.view(2, 5), None, released]).num_bytes == 40


def test_what_is_not_measured_takes_nothing() -> None:
    assert set(vars(Bytes()).values()) == {0}


def test_step_counters_are_no_optimizer_state() -> None:
    param = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.AdamW([param])
    param.sum().backward()
    optimizer.step()
    assert optimizer_storages(optimizer).num_bytes == 2 * 400


def test_the_counter_sees_what_is_still_alive() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with ActivationCounter() as counter:
        x = torch.randn(4, 8)
        y = (x @ weight).relu()  # the product itself is not needed for backward
        del x
    assert counter.alive_bytes(Storages([weight])) == 2 * 4 * 8 * 4  # x, for the gradient of weight; and y
    y.sum().backward()
    del y
    assert counter.alive_bytes(Storages([weight])) == 0


def test_excluded_storages_are_not_activations() -> None:
    with ActivationCounter() as counter:
        kept = torch.randn(16)
        other = torch.randn(4)
    assert counter.alive_bytes(Storages([kept])) == other.nbytes


def test_the_peak_covers_what_was_allocated_and_released() -> None:
    before = peak_bytes(torch.device("cpu"))
    torch.ones(64 << 20)  # 256 MiB, touched
    assert peak_bytes(torch.device("cpu")) >= max(before, 256 << 20)


def test_full_parameters_and_gradients_count_beside_their_shards() -> None:
    model = nn.Linear(4, 2)
    local = nn.Parameter(torch.zeros(4))  # of a unit that is gathered now
    local.grad, model.bias.grad = torch.zeros(4), torch.zeros(2)
    shard = Shard("weight", local, local, torch.Size((2, 4)))
    assert parameter_storages(model, [shard]).num_bytes == 4 * (4 + 8 + 2)
    assert gradient_storages(model, [shard]).num_bytes == 4 * (4 + 2)


def test_what_the_system_says_of_this_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Name:\tpython\nVmHWM:\t   300 kB\nVmRSS:\t   200 kB\nRssFile:\t   100 kB\n"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (peak_bytes(torch.device("cpu")), resident_bytes(), mapped_bytes()) == (300 << 10, 200 << 10, 100 << 10)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert (resident_bytes(), mapped_bytes()) == (None, 0)
    usage = SimpleNamespace(ru_maxrss=500)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: usage)
    for platform, peak in (("linux", 500 << 10), ("darwin", 500)):
        monkeypatch.setattr(memory.sys, "platform", platform)
        assert peak_bytes(torch.device("cpu")) == peak


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 5 bytes"), True),
        (RuntimeError("another"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, is_of_memory: bool) -> None:
    assert is_out_of_memory(error) == is_of_memory


def test_meta_tensors_take_no_memory_and_are_told_apart() -> None:
    """Fake tensors of a forecast have no address."""
    with ActivationCounter() as counter:
        kept = [torch.empty(4, device="meta"), torch.empty(8, device="meta")]
        view = kept[0].view(2, 2)
    assert counter.alive_bytes() == 4 * (4 + 8) and view.shape == (2, 2)
    assert Storages(kept).num_bytes == 0
