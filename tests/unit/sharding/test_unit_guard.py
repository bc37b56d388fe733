"""Tensors in outputs of a unit that torch does not see: those in attributes of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.sharding.engines.torch.unit_guard import _hidden_tensors
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
