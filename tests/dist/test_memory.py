"""State bytes per rank against the ZeRO paper's formulas, and what the ledger counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_on_ranks
from vissl_zero.models.model import Unit
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.engines.torch.strategy import TorchStrategy
from vissl_zero.sharding.sharded_model import ShardedModel

CPU = torch.device("cpu")


class _Stack(nn.Module):
    """Uneven layers of 3.3 M parameters in all, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        widths = [33, 1001, 1003, 997, 305]
        self.blocks = nn.ModuleList(Unit(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], 3001)

    def forward(self, xs: list[Tensor]) -> Tensor:
        for block in self.blocks:
            xs = block(xs)
        return self.head(torch.cat(xs))

    def units(self) -> list[nn.Module]:
        return [*self.blocks, self.head]


def _shard(level: int, optimizer: str, model: nn.Module | None = None) -> ShardedModel:
    torch.manual_seed(0)
    model = model or _Stack()
    group = ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, False, 0.0)
    build = {
        "sgd": lambda groups: (torch.optim.SGD(groups, momentum=0.9), None),
        "adamw": lambda groups: (torch.optim.AdamW(groups), None),
    }[optimizer]
    return TorchStrategy().shard(model, [group], build, ShardingPlan(level=level, sync_bn_group=-1), CPU)


def _train(sharded: ShardedModel, num_micro_batches: int) -> dict[str, int]:
    """One step; the ledger after the last backward pass and before the step."""
    for index in range(num_micro_batches):
        with sharded.micro_batch(is_last=index == num_micro_batches - 1):
            sharded.backward(sharded.model([torch.randn(4, 33), torch.randn(2, 33)]).square().mean())
    memory = sharded.ledger()
    sharded.step()
    sharded.zero_grad()
    return vars(memory)


def _bytes_of_second_step(level: int, optimizer: str) -> dict[str, int]:
    sharded = _shard(level, optimizer)
    _train(sharded, 2)
    memory = dict(_train(sharded, 2))
    params = sum(param.numel() for param in _Stack().parameters())
    whole = sum(param.numel() * 4 for param in sharded.model.parameters() if not hasattr(param, "to_local"))
    return memory | {"elements": params, "left_whole": whole if level == 3 else 0, "after": sharded.ledger().grads}


def _formula(level: int, optimizer: str, num_params: int, world_size: int) -> float:
    """Bytes per rank in float32: parameters + gradients + optimizer state (arXiv 1910.02054)."""
    shares = [1, 1, 1]  # of parameters, gradients, optimizer state
    for kind in range(level):
        shares[2 - kind] = world_size
    state = 4 if optimizer == "sgd" else 8
    return num_params * (4 / shares[0] + 4 / shares[1] + state / shares[2])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("level", "optimizer"), [(level, "sgd") for level in range(4)] + [(1, "adamw"), (3, "adamw")])
def test_state_bytes_are_within_one_percent_of_the_formula(level: int, optimizer: str, world_size: int) -> None:
    per_rank = run_on_ranks(world_size, _bytes_of_second_step, level, optimizer)
    num_params = per_rank[0]["elements"]
    assert num_params > 3_000_000
    largest = max(memory["params"] + memory["grads"] + memory["optimizer"] for memory in per_rank)
    formula = _formula(level, optimizer, num_params, world_size)
    print(f"level {level} {optimizer} world {world_size}: {largest / formula:.4f} of the formula")
    assert largest <= 1.01 * formula
    assert {memory["left_whole"] for memory in per_rank} == {0}
    assert {memory["after"] for memory in per_rank} == {0}
    assert per_rank[0]["peak"] > per_rank[0]["params"]
    # What a pass gathers: at level 3 the largest block and the root around it, which has the head's parameters.
    gathered = 4 * ((1001 + 1) * 1003 + (305 + 1) * 3001) if level == 3 else 0
    for memory in per_rank:
        assert gathered <= memory["params_step_peak"] - memory["params"] <= 1.01 * gathered


def _ledger_between_micro_batches(level: int) -> dict[str, int]:
    sharded = _shard(level, "sgd")
    with sharded.micro_batch(is_last=False):
        sharded.backward(sharded.model([torch.randn(4, 33)]).square().mean())
    return vars(sharded.ledger())


@pytest.mark.timeout(60)
def test_levels_differ_in_what_stays_whole_between_micro_batches() -> None:
    whole = 4 * sum(param.numel() for param in _Stack().parameters())
    first, second, third = (run_on_ranks(2, _ledger_between_micro_batches, level)[0] for level in (1, 2, 3))
    assert first["grads"] >= whole
    assert second["grads"] < 0.51 * whole
    assert third["grads"] < 0.51 * whole
    assert first["params"] >= whole and second["params"] >= whole
    assert third["params"] < 0.51 * whole


def _activations(checkpoint_every: int) -> int:
    torch.manual_seed(0)
    model = _Stack()
    group = ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, False, 0.0)
    plan = ShardingPlan(level=3, checkpoint_every=checkpoint_every)
    sharded = TorchStrategy().shard(model, [group], lambda groups: (torch.optim.SGD(groups, lr=0.1), None), plan, CPU)
    with sharded.micro_batch(is_last=True):
        with sharded.measure_activations():
            loss = sharded.model([torch.randn(64, 33)]).square().mean()
        sharded.backward(loss)
    return sharded.ledger().activations


@pytest.mark.timeout(60)
def test_activations_are_what_backward_needs() -> None:
    plain = run_on_ranks(2, _activations, 0)[0]
    recomputed = run_on_ranks(2, _activations, 1)[0]
    widths, rows = [1001, 1003, 997, 305], 64
    # The input; each block's input to batch norm and output; the rows joined; the head's output, which is squared; and,
    # without rows, two statistics per channel and the loss.
    per_row = 33 + 2 * sum(widths) + widths[-1] + 3001
    assert plain == 4 * (rows * per_row + 2 * sum(widths) + 1)
    # Each block's input only; the last block's output lives on as the rows joined.
    assert recomputed == 4 * (rows * (33 + sum(widths) + 3001) + 1)
