"""Optimizers that look at full tensors, above level 0: what they see when they are built, and what they hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from vissl_zero.resolve.resolved import OffloadPlan
from vissl_zero.sharding.memory import Storages
from vissl_zero.sharding.offload.block_file import OffloadError
from vissl_zero.sharding.state.shard import whole_shard
from vissl_zero.sharding.update.whole_tensors import ROUND_ELEMENTS, WholeTensorOptimizer, _rounds_of, partition


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "owners"),
    [
        ([1, 5, 3, 3], 2, [0, 0, 1, 1]),  # the largest first, each to the rank that has least
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),  # ties: in order, to the first rank
        ([2, 7], 3, [1, 0]),
        ([], 2, []),
    ],
)
def test_tensors_are_shared_out_evenly(sizes: list[int], num_ranks: int, owners: list[int]) -> None:
    assert partition(sizes, num_ranks) == owners


HALF = ROUND_ELEMENTS // 2


@pytest.mark.parametrize(
    ("sizes", "owners", "rounds"),
    [
        ([HALF] * 5, [0] * 5, [[0, 1], [2, 3], [4]]),
        ([HALF] * 4, [0, 1, 0, 1], [[0, 1, 2, 3]]),  # each rank has its own bound
        ([HALF] * 3 + [1], [0, 0, 0, 1], [[0, 1, 3], [2]]),
        ([HALF, 6 * HALF, HALF, 5 * HALF, 1], [0] * 5, [[0], [1], [2, 3], [4]]),  # the largest is the bound
        ([], [], [[]]),
    ],
)
def test_rounds_are_as_few_as_memory_allows(sizes: list[int], owners: list[int], rounds: list[list[int]]) -> None:
    assert _rounds_of(sizes, owners) == rounds


def test_an_optimizer_is_built_over_full_values(group: dist.ProcessGroup) -> None:
    shards = [whole_shard(name, param) for name, param in nn.Linear(4, 3).named_parameters()]
    seen: list[Tensor] = []

    def build(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
        seen.extend(param.detach().clone() for one in groups for param in one["params"])
        return torch.optim.SGD(groups), None

    WholeTensorOptimizer(build, [{"params": [s.local for s in shards], "lr": 0.1}], shards, group, OffloadPlan())
    assert len(seen) == 2 and all(map(torch.equal, seen, [shard.source for shard in shards]))


def test_bytes_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = {"type": "Muon", "lr": 0.1}
    model, optimizer = vissl_zero.initialize(model, settings, {"level": 3, "offload_param_config": tier})
    base: Any = optimizer._sharded.optimizer  # type: ignore[attr-defined]
    buffers = Storages(base.resident_tensors).num_bytes
    optimizer.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    # Muon's momentum of the matrix, and AdamW's two of the bias; counters of steps do not count.
    assert Storages(base.resident_tensors).num_bytes - buffers == 4 * 64 * 64 + 4 * 2 * 64
    assert base.disk_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 4 * 64 * 64
    optimizer.close()


def test_state_on_a_disk_is_a_mapping_by_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    tier, settings = {"device": "nvme", "nvme_path": str(tmp_path)}, {"type": "Muon", "lr": 0.1, "weight_decay": 0.0}
    model, optimizer = vissl_zero.initialize(model, settings, {"level": 3, "offload_optimizer_config": tier})
    base: Any = optimizer._sharded.optimizer  # type: ignore[attr-defined]
    states, wholes = base.on_disk, [shard.local for shard in base.owned.values()]

    def step() -> None:
        optimizer.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        optimizer.zero_grad()

    assert len(states) == 0 and wholes[0] not in states
    step()
    once = {name: param.full_tensor() for name, param in model.named_parameters()}
    assert list(states) == wholes and len(states) == 2
    assert "momentum_buffer" in states[wholes[0]] and float(states[wholes[1]]["step"]) == 1.0
    del states[wholes[0]]
    assert list(states) == wholes[1:] and wholes[0] not in states and wholes[1] in states
    states.clear()
    assert len(states) == 0 and list(states) == []
    model.load_state_dict(plain.state_dict())
    step()
    assert all(torch.equal(param.full_tensor(), once[name]) for name, param in model.named_parameters())
    assert base.disk_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 4 * 5 * 3
    optimizer.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OffloadError, match="was ended"):
        states[wholes[0]]
