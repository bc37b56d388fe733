"""Tensors in outputs of a unit that torch does not see, and in which passes parameters are checked."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.sharding.engines.torch.unit_guard import _Forward, _GuardedUnit, _hidden_tensors
from vissl_zero.sharding.torch_private import FOLLOWS_DATACLASSES

A, B = torch.ones(1), torch.ones(2)


class _Holder:
    def __init__(self, **values: Any):
        vars(self).update(values)


@dataclass(frozen=True)
class _Record:
    value: Any


class _Slots:
    __slots__ = ("value",)


_circle = _Holder(value=A)
_circle.itself = _circle  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("output", "hidden"),
    [
        *((plain, []) for plain in (None, A, "text", b"bytes", 3, 0.5, len, nn.Linear(1, 1), _Slots())),
        *((seen, []) for seen in ([A], (A, B), {"a": A}, {"a": [A, {"b": B}]})),
        (_Holder(value=A), [A]),
        (_Holder(value=[A, (3, B)], text="a"), [A, B]),
        (_Holder(value={"a": A}), [A]),
        (_Holder(value=_Holder(value=A)), [A]),
        ([_Holder(value=A), _Holder(value=B)], [A, B]),
        ((3, {"a": _Holder(value=B)}), [B]),
        ({"a": A, "b": _Holder(value=B)}, [B]),
        ({_Holder(value=B)}, [B]),
        (_Record(A), [A] * (not FOLLOWS_DATACLASSES)),
        (_Record(_Holder(value=A)), [A]),
        (_Record([_Holder(value=A), 3]), [A]),
        (_circle, [A]),
        ([_circle, _circle], [A]),
    ],
)
def test_tensors_in_attributes_are_hidden(output: Any, hidden: list[Any]) -> None:
    found = list(_hidden_tensors(output, set()))
    assert len(found) == len(hidden) and all(one is other for one, other in zip(found, hidden, strict=True))


@pytest.mark.parametrize(
    ("device", "compared"),
    [
        ("cpu", {3: [0, 1], 4: [0], 5: [1], 6: [0], 100: [0], 101: [1]}),  # in turn: it costs a pass over the parameter
        ("cuda", {3: [0, 1], 4: [], 5: [], 99: [], 100: [0, 1], 101: [], 200: [0, 1]}),  # it waits for the device
    ],
)
def test_parameters_are_compared_in_the_first_passes_and_then_in_some(
    device: str, compared: dict[int, list[int]]
) -> None:
    unit = _GuardedUnit.__new__(_GuardedUnit)
    param: Any = SimpleNamespace(unsharded_param=SimpleNamespace(device=torch.device(device)))
    unit._group = SimpleNamespace(fsdp_params=[param, param])
    for num_runs, indices in compared.items():
        unit._num_runs = num_runs
        assert [index for index in range(2) if unit._is_compared(index, param)] == indices, num_runs


def test_saved_tensors_are_checked_in_the_first_passes_and_then_in_every_hundredth() -> None:
    forward = _Forward.__new__(_Forward)
    forward._num_runs = 0
    forward._group = SimpleNamespace(is_sharded=False)
    assert [run for run in range(1, 302) if forward._is_sample()] == [1, 2, 3, 100, 200, 300]
    with torch.no_grad():
        assert not forward._is_sample()  # nothing is saved
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert not forward._is_sample()  # the hooks of others may put a copy elsewhere
    forward._group = None
    assert not forward._is_sample() and forward._num_runs == 301
