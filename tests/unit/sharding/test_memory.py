"""Bytes by unique storage."""

from __future__ import annotations

import torch
from torch import nn

from vissl_zero.sharding.memory import ActivationCounter, Storages, optimizer_storages, peak_bytes


def test_shared_and_released_memory_counts_once_and_not_at_all() -> None:
    base = torch.zeros(10)
    released = torch.zeros(10)
    released.untyped_storage().resize_(0)
    assert Storages([base, base[2:5], base.view(2, 5), None, released]).num_bytes == 40


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
