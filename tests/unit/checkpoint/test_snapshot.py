"""What of a run goes into a checkpoint, under which names; what JSON cannot hold is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.snapshot import (
    ForwardState,
    HostMemory,
    Snapshot,
    _digest_of,
    _hook_states,
    _split,
    hook_names,
    replicated_parts,
    stored_name,
)
from vissl_zero.engine.hook import Hook
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state.saved_state import Part

NOT_IN_JSON = [math.nan, math.inf, {1, 2}, object(), [torch.ones(1)], {(1, 2): 3}]


class Keeps(Hook):
    def __init__(self, state: Any):
        self.state = state

    def state_dict(self) -> Any:
        return self.state


class Other(Keeps):
    """Of another name."""


def test_hooks_have_the_names_of_their_classes_numbered_where_there_are_several() -> None:
    hooks = [Keeps({}), Other({}), Keeps({}), Keeps({}), Other({})]
    assert hook_names(hooks) == ["Keeps", "Other", "Keeps.1", "Keeps.2", "Other.1"]
    states = [{"a": 1}, {}, {"a": [1, 2]}, {"a": (1, 2)}, {"a": None}]
    hooks = [type(hook)(state) for hook, state in zip(hooks, states, strict=True)]
    stored = _hook_states(hooks)
    assert stored == {"Keeps": {"a": 1}, "Keeps.1": {"a": [1, 2]}, "Keeps.2": {"a": [1, 2]}, "Other.1": {"a": None}}
    states[2]["a"].append(3)
    assert stored["Keeps.1"] == {"a": [1, 2]}, "a copy: the hook goes on while it is written"


@pytest.mark.parametrize("value", NOT_IN_JSON, ids=lambda value: type(value).__name__)
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of the hook Keeps holds what JSON cannot"):
        _hook_states([Keeps({"a": value})])
    with pytest.raises(CheckpointError, match=f"State 'a' of the loss is a {type(value).__name__}"):
        _split({"a": value})


def test_state_of_the_loss_is_tensors_and_what_json_holds() -> None:
    numbers = [1, 2]
    tensors, others = _split({"bank": torch.ones(2), "step": 3, "numbers": numbers, "_extra_state": None})
    numbers.append(3)
    assert list(tensors) == ["bank"] and others == {"step": 3, "numbers": [1, 2], "_extra_state": None}


def test_copies_of_what_forward_changes_stay() -> None:
    state = ForwardState({"mean": torch.ones(2)}, {"bank": torch.ones(2), "list": [1]}, {"torch": "ab"})
    copied = state.copy()
    for values in (state.buffers["mean"], state.criterion["bank"]):
        values.zero_()
    state.criterion["list"].append(2)
    assert copied.buffers["mean"].tolist() == copied.criterion["bank"].tolist() == [1.0, 1.0]
    assert copied.criterion["list"] == [1] and copied.rng == {"torch": "ab"}


def _part(name: str, values: torch.Tensor, **more: Any) -> Part:
    entry = Entry.of(name, values)
    return Part(name, values.shape, 0, values.numel(), values.dtype, entry.read, **more)


def test_memory_of_one_save_serves_the_next_where_it_fits() -> None:
    memory, values = HostMemory(), torch.ones(2, 2)
    memory.begin()
    places = []
    for later in (values, values * 2, torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3)):
        (copied,) = memory.copy([_part("w", later)])
        places.append(copied.read().data_ptr())
        assert copied.read().equal(later.flatten()) and copied.read().dtype == later.dtype
    assert places[0] == places[1]
    values.zero_()
    (first, second) = memory.copy([_part("w", values), _part("v", values + 1)])
    assert first.read().tolist() == [0.0] * 4 and second.read().tolist() == [1.0] * 4


def test_a_snapshot_is_streamed_if_any_part_of_it_is() -> None:
    whole, streamed = _part("a", torch.ones(1)), _part("b", torch.ones(1), is_streamed=True)
    for parts, is_streamed in (([whole], False), ([whole, streamed], True), ([], False)):
        manifest: Any = None
        assert Snapshot(parts, [], {}, {}, manifest).is_streamed is is_streamed


def test_a_digest_is_of_names_and_values_in_any_order() -> None:
    one = {"a": torch.ones(2), "b": torch.zeros(2)}
    same = {"b": torch.zeros(2), "a": torch.ones(2)}
    others = [{"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(2), "c": torch.zeros(2)}, {}]
    assert _digest_of(one) == _digest_of(same)
    assert len({_digest_of(one), *map(_digest_of, others)}) == 4
    assert all(0 <= _digest_of({"a": torch.tensor(float(i))}) < 2**63 for i in range(20))


def test_names_of_what_every_rank_has() -> None:
    parts = replicated_parts("buffer", {"mean": torch.ones(2, 3)})
    assert [(p.name, tuple(p.full_shape), p.first_element, p.num_elements) for p in parts] == [
        ("buffer/mean", (2, 3), 0, 6)
    ]
    names = {"of_rank/0/buffer/mean": 1, "buffer/mean": 1, "buffer/var": 1}
    assert stored_name(names, "buffer", "mean", 1) == "of_rank/0/buffer/mean"
    assert stored_name(names, "buffer", "mean", 2) == "buffer/mean"  # other ranks wrote it
    assert stored_name(names, "buffer", "var", 1) == "buffer/var"
