"""What is checked before an update. One process; many ranks are in tests/dist."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.checks.replica_check import ParameterGuard, StepCheck, option_text, text_digest
from vissl_zero.sharding.state.shard import shards_of, whole_shard


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (0.1, "0.1"),
        (None, "None"),
        (True, "True"),
        ("a", "'a'"),
        (torch.tensor(0.5), "0.5"),
        (torch.tensor([1, 2]), "[1, 2]"),
        (object(), "object"),  # whose own text has its address
    ],
)
def test_the_text_of_an_option_is_its_value(option: Any, text: str) -> None:
    assert option_text(option) == text


def test_digests_are_of_32_bits_and_of_all_values() -> None:
    digests = {text_digest(*values) for values in ((), (1,), (2,), (1, 2), ([1, 2],))}
    assert len(digests) == 5 and all(0 <= digest < 2**32 for digest in digests)


def test_one_process_has_problems_and_marks_of_its_own() -> None:
    check = StepCheck(torch.device("cpu"))
    assert list(check.require_equal(None, {"a fact": 1}, [True, False])) == [True, False]
    with pytest.raises(VisslZeroError, match="cannot go on"):
        check.require_equal("cannot go on", {"a fact": 1})


def _change(what: str, model: Any) -> None:
    if what == "moved":
        model[0].weight.data = model[0].weight.data.double()
    elif what == "removed":
        model[0] = nn.Identity()
    elif what == "added":
        model.append(nn.Linear(2, 2))
    elif what == "thawed":
        model[1].bias.requires_grad_(True)
    elif what == "hooked":
        model[1].weight.register_hook(lambda grad: grad)
    elif what == "places":
        model[0], model[1] = model[1], model[0]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nothing", None),
        ("places", None),  # of the same layers
        ("thawed", "1.bias was frozen when sharding began"),
        ("hooked", "A hook was set on 1.weight after sharding began"),
        ("moved", "memory of 0.weight was replaced"),
        ("removed", "0.weight is not in the model any more"),
        ("added", "2.weight was not in the model that was given"),
    ],
)
def test_a_model_that_shards_cannot_follow_is_told(what: str, sentence: str | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    shards = list(shards_of(model, None))
    guard = ParameterGuard(model, shards, torch.optim.SGD([shards[0].local], lr=0.1))
    _change(what, model)
    for _ in range(2):
        problem = guard.problem()
        assert problem is None if sentence is None else sentence in str(problem)


def test_a_model_of_other_parameters_than_the_shards_may_be_rebuilt() -> None:
    """fairscale's FSDP puts flat parameters into some units, and makes them anew."""
    model, elsewhere = nn.Sequential(nn.Linear(2, 2)), nn.Parameter(torch.ones(2))
    shards = [*shards_of(model, None), whole_shard("in_a_flat_one", elsewhere)]
    guard = ParameterGuard(model, shards, torch.optim.SGD([elsewhere], lr=0.1))
    _change("added", model)
    assert guard.problem() is None


def test_memory_that_the_first_passes_replace_is_told_there_and_a_copy_is_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ParameterGuard(model, list(shards_of(model, None)), torch.optim.SGD(model.parameters(), lr=0.1))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in (model, *copies):
        one[0].double()
    for one in copies:
        assert one(torch.ones(1, 2).double()).shape == (1, 2)
    with pytest.raises(VisslZeroError, match=r"memory of 0.weight was replaced"):
        model(torch.ones(1, 2).double())


def test_no_other_optimizer_step_runs_than_shardings_own() -> None:
    model = nn.Linear(2, 2)
    shards = list(shards_of(model, None))
    optimizer = torch.optim.SGD([shard.local for shard in shards], lr=0.1)
    guard = ParameterGuard(model, shards, optimizer)
    for _ in range(2):
        with pytest.raises(VisslZeroError):
            optimizer.step()
        with guard.own_step():
            optimizer.step()
