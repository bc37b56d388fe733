"""What ranks store of parameters and state: each element once, whoever holds it, and any other cut takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

import vissl_zero
from tests.memory_store import MemoryStore
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.state.saved_state import (
    Part,
    group_facts,
    parts_of,
    restore_counters,
    restore_state,
    scalars_of,
    take_group_options,
)
from vissl_zero.sharding.state.shard import Shard, whole_shard

FULL = {"matrix": torch.arange(10.0).view(5, 2), "scalar": torch.tensor(7.0), "nothing": torch.zeros(0, 3)}


class _Rank:
    """Rows of ``FULL`` under an optimizer, which has made a step if there are elements."""

    def __init__(
        self, rows: slice, num_ranks: int = 1, rank: int = 0, is_replicated: bool = False, empty: bool = False
    ):
        self.shards: dict[str, Shard] = {}
        for name, full in FULL.items():
            is_cut = name == "matrix"
            values = full[rows] if is_cut else full
            local = nn.Parameter(torch.zeros_like(values) if empty else values.clone())
            # All ranks hold what cannot be cut.
            copies = {} if is_cut and not is_replicated else {"num_copies": num_ranks, "copy": rank}
            self.shards[name] = Shard(name, local, local, full.shape, 2 * rows.start if is_cut else 0, **copies)
        self.optimizer = torch.optim.AdamW([{"params": [s.local for s in self.shards.values()], "name": "all"}], lr=0.1)

    def step(self) -> _Rank:
        for name, shard in self.shards.items():
            first, count = shard.first_element, shard.local.numel()
            grad = (torch.arange(float(FULL[name].numel())) + 1)[first : first + count]
            shard.local.grad = grad.view(shard.local.shape)
        self.optimizer.step()
        return self


class _Store(MemoryStore):
    """Parts of all ranks, put together, and how often each element was stored."""

    def __init__(self, ranks: Sequence[_Rank]):
        super().__init__()
        self.counts: dict[str, Tensor] = {}
        for rank in ranks:
            for part in parts_of(rank.shards, rank.optimizer):
                self.store(part.name, tuple(part.full_shape), part.first_element, part.read())
                count = self.counts.setdefault(part.name, torch.zeros(part.full_shape))
                count.view(-1)[part.first_element : part.first_element + part.num_elements] += 1
            for name, values in scalars_of(rank.shards, rank.optimizer).items():
                assert name not in self.numbers, "one rank answers for it"
                self.numbers[name] = values


CUTS = {
    "one rank": [_Rank(slice(0, 5))],
    "two": [_Rank(slice(0, 3), 2), _Rank(slice(3, 5), 2, 1)],
    "one without rows": [_Rank(slice(0, 5), 2), _Rank(slice(5, 5), 2, 1)],
    "three that hold the same": [_Rank(slice(0, 5), 3, rank, is_replicated=True) for rank in range(3)],
}


@pytest.mark.parametrize("cut", CUTS)
def test_each_element_is_stored_once(cut: str) -> None:
    for rank in CUTS[cut]:
        rank.step()
    store = _Store(CUTS[cut])
    assert {name for name in store.tensors if name.startswith("model/")} == {f"model/{name}" for name in FULL}
    assert all((count == 1).all() for count in store.counts.values())
    assert set(store.numbers) == set(FULL)
    for name in ("matrix", "scalar"):
        assert store.numbers[name]["step"]["value"] >= 1.0
        assert {f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}"} <= store.tensors.keys()


@pytest.mark.parametrize("after", ["float32", "float64"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_another_cut_takes_what_was_stored(after: str, is_turned: bool) -> None:
    source = _Rank(slice(0, 5)).step()
    store = _Store([source])
    rank = _Rank(slice(1, 4), empty=True)
    for shard in rank.shards.values():
        shard.local.data = shard.local.data.to(getattr(torch, after))
    if is_turned:  # in another order of memory, as channels-last kernels are
        matrix = rank.shards["matrix"].local
        matrix.data = matrix.data.t().contiguous().t()
    restore_state(store, rank.shards, rank.optimizer, None)
    assert torch.equal(rank.shards["matrix"].local.float(), source.shards["matrix"].local[1:4])
    state, whole = (one.optimizer.state[one.shards["matrix"].local] for one in (rank, source))
    for key in ("exp_avg", "exp_avg_sq"):
        assert (
            torch.equal(state[key].float(), whole[key][1:4]) and state[key].dtype == rank.shards["matrix"].local.dtype
        )
    assert float(state["step"]) == float(whole["step"]) == 1.0
    assert float(rank.optimizer.state[rank.shards["scalar"].local]["exp_avg"]) == pytest.approx(0.1)


def _scaled(scale: float) -> LossScale:
    return LossScale(scale, good_steps=5)


def test_the_loss_scale_comes_back_and_is_there_or_not_in_both() -> None:
    store, rank, scale = _Store([_Rank(slice(0, 5)).step()]), _Rank(slice(0, 5)), _scaled(2.0)
    store.loss_scale = _scaled(8.0).state_dict()
    restore_state(store, rank.shards, rank.optimizer, scale)
    assert scale.state_dict() == {"scale": 8.0, "good_steps": 5}
    with pytest.raises(CheckpointError, match="differ in loss scaling"):
        restore_state(store, rank.shards, rank.optimizer, None)
    store.loss_scale = None
    with pytest.raises(CheckpointError, match="differ in loss scaling"):
        restore_state(store, rank.shards, rank.optimizer, scale)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop("model/matrix"), "matrix"),
        (lambda tensors: tensors.update({"model/more": torch.ones(1)}), "more"),
        (
            lambda tensors: tensors.update({"model/matrix": torch.ones(2, 5)}),
            r"matrix has shape \(2, 5\) in the checkp",
        ),
        (
            lambda tensors: tensors.pop("optimizer/exp_avg/matrix"),
            "another optimizer: of matrix it holds .* not exp_avg",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(change: Any, sentence: str) -> None:
    store, rank = _Store([_Rank(slice(0, 5)).step()]), _Rank(slice(0, 5), empty=True)
    change(store.tensors)
    with pytest.raises(CheckpointError, match=sentence):
        restore_state(store, rank.shards, rank.optimizer, None)
    assert not rank.shards["matrix"].local.any() and not rank.optimizer.state


def test_a_frozen_parameter_gets_no_state() -> None:
    store, rank = _Store([_Rank(slice(0, 5)).step()]), _Rank(slice(0, 5))
    rank.optimizer.param_groups[0]["params"].remove(rank.shards["matrix"].local)
    restore_state(store, rank.shards, rank.optimizer, None)
    assert rank.shards["matrix"].local not in rank.optimizer.state
    assert rank.shards["scalar"].local in rank.optimizer.state


def test_what_had_no_state_when_it_was_stored_has_none_after() -> None:
    store, rank = _Store([_Rank(slice(0, 5)).step()]), _Rank(slice(0, 5)).step()
    for key in ("exp_avg", "exp_avg_sq"):
        del store.tensors[f"optimizer/{key}/matrix"]
    del store.numbers["matrix"]
    restore_state(store, rank.shards, rank.optimizer, None)
    assert rank.shards["matrix"].local not in rank.optimizer.state
    assert rank.shards["scalar"].local in rank.optimizer.state


def test_options_of_groups_come_back_as_they_were() -> None:
    rank = _Rank(slice(0, 5))
    (facts,) = group_facts(rank.shards, rank.optimizer)
    assert facts["params"] == list(FULL) and facts["lr"] == 0.1 and facts["name"] == "all"
    rate = torch.tensor(0.5)
    group: dict[str, Any] = {"params": [1], "lr": rate, "betas": (0.5, 0.5)}
    take_group_options(group, {"params": ["x"], "lr": 0.25, "betas": [0.1, 0.2], "new": None})
    assert group == {"params": [1], "lr": 0.25, "betas": (0.1, 0.2), "new": None}
    take_group_options(group, {"lr": {"dtype": "float32", "value": 0.125}})
    assert isinstance(group["lr"], Tensor) and float(group["lr"]) == 0.125
    group["lr"] = rate
    take_group_options(group, {"lr": {"dtype": "float32", "value": 0.75}})
    assert group["lr"] is rate and float(rate) == 0.75, "a schedule may hold the very tensor"


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize(
    ("block", "on_disk"), [("offload_optimizer_config", "optimizer/"), ("offload_param_config", "model/")]
)
def test_what_is_on_a_disk_is_stored_from_there_and_comes_back(
    optimizer: str, block: str, on_disk: str, tmp_path: Path
) -> None:
    def start() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
        tier = {"device": "nvme", "nvme_path": str(tmp_path)}
        return vissl_zero.initialize(model, {"type": optimizer, "lr": 0.1}, {"level": 3, block: tier})

    def step(model: nn.Module, trainer: Any) -> dict[str, Tensor]:
        trainer.backward(model(torch.ones(2, 4)).square().sum() + model.nothing.sum())
        trainer.step()
        trainer.zero_grad()
        return trainer.full_state()

    model, trainer = start()
    step(model, trainer)
    for part in trainer._sharded.parts():
        is_on_disk = part.name.startswith(on_disk) and part.num_elements > 0
        assert part.is_streamed == is_on_disk, "else a copy of it fills the memory"
    trainer.save(tmp_path / "saved")
    second = step(model, trainer)
    model, trainer = start()
    trainer.load(tmp_path / "saved")
    again = step(model, trainer)
    assert all(torch.equal(again[name], tensor) for name, tensor in second.items())


def test_a_whole_tensor_is_a_part_that_shares_its_memory() -> None:
    tensor = nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    part = Part.of("criterion/queue", tensor)
    assert (part.name, part.full_shape, part.dtype) == ("criterion/queue", (2, 3), torch.float64)
    assert (part.first_element, part.num_elements, part.is_streamed) == (0, 6, False)
    assert not part.read().requires_grad and part.read().data_ptr() == tensor.data_ptr()


def test_only_what_an_optimizer_counts_in_its_groups_is_restored() -> None:
    """By the groups' names; settings are those of the recipe."""

    def groups_of(build: Any) -> Any:
        named = [{"params": [nn.Parameter(torch.ones(2))], "name": name} for name in ("trunk", "head", "new")]
        return build(named, lr=0.1)

    def counts(optimizer: Any) -> list[tuple[Any, Any, float]]:
        return [(group.get("k"), group.get("lr_max"), group["lr"]) for group in optimizer.param_groups]

    saved = [{"name": "head", "k": 7, "lr_max": 0.5, "lr": 9.0}, {"name": "trunk", "k": 3, "lr": 9.0}]
    counting = groups_of(AdamWScheduleFree)
    counting.train()
    (_, first, _), *_ = counts(counting)
    restore_counters(counting, saved)
    assert counts(counting) == [(3, first, 0.1), (7, 0.5, 0.1), (0, first, 0.1)]
    plain = groups_of(torch.optim.SGD)
    restore_counters(plain, saved)
    assert counts(plain) == [(None, None, 0.1)] * 3


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.Adafactor])
def test_only_single_numbers_of_no_element_are_written_beside_the_tensors(build: Any) -> None:
    """A scalar parameter's moments are of its element; the rows of Adafactor are of none, and no numbers."""
    params = {"matrix": nn.Parameter(torch.ones(3, 2)), "scalar": nn.Parameter(torch.tensor(2.0))}
    kept = {name: param for name, param in params.items() if build is torch.optim.AdamW or param.dim()}
    optimizer = build([{"params": list(kept.values()), "name": "all"}], lr=0.1)
    for param in kept.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    shards = {name: whole_shard(name, param) for name, param in kept.items()}
    step = {"value": 1.0, "dtype": "float32"}
    assert scalars_of(shards, optimizer) == {name: {"step": step} for name in kept}
