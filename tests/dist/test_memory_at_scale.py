"""State bytes of one rank among 2 to 64, of which only that one is there: collectives are torch's fake ones.

What a fake group hands out are no numbers to trust, but their bytes are. test_memory.py counts them on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dist.test_memory import _Stack, _train
from vissl_zero.optim.adaptation import Larc
from vissl_zero.optim.elementwise import adamw, sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.engines.torch import fully_sharded
from vissl_zero.sharding.engines.torch import strategy as torch_strategy
from vissl_zero.sharding.engines.torch.strategy import TorchStrategy
from vissl_zero.sharding.sharded_model import ShardedModel

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "sgd": lambda groups: (sgd(groups), None),
    "larc": lambda groups: (sgd(groups), Larc()),
    "adamw": lambda groups: (adamw(groups), None),
}
STATE = {"sgd": 4, "larc": 4, "adamw": 8}  # bytes per parameter
FLOAT32 = Precision()
MIXED = Precision(compute="bfloat16", reduce="bfloat16")


class _FakeCommunicator(CpuCommunicator):
    """What this rank says is what all say."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float):
        super().__init__(group.size(), group.rank(), 2**21)
        self._slots = [torch.zeros(self.slot_bytes, dtype=torch.uint8) for _ in range(self.num_slots)]

    def buffers(self) -> list[Tensor]:
        return self._slots

    def _slot(self, number: int) -> Tensor:
        return self._slots[number % self.num_slots]

    def _publish(self, number: int, message: Tensor, is_scatter: bool) -> None: ...

    def _has_come(self, number: int) -> bool:
        return True

    def _received(self, number: int) -> Sequence[Tensor]:
        return [self._slot(number)] * self.num_ranks


@contextmanager
def _among(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0, the fullest, of ``world_size``."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with (
            patch.object(fully_sharded, "open_communicator", _FakeCommunicator),
            patch.object(torch_strategy, "open_communicator", _FakeCommunicator),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _shard(model: torch.nn.Module, level: int, optimizer: str, precision: Precision) -> ShardedModel:
    group = ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, True, 0.1)
    plan = ShardingPlan(level=level, sync_bn_group=0, precision=precision)
    return TorchStrategy().shard(model, [group], OPTIMIZERS[optimizer], plan, torch.device("cpu"))


def _formula(level: int, is_mixed: bool, state: int, world_size: int) -> float:
    """Bytes per parameter (https://arxiv.org/abs/1910.02054): parameters + gradients + optimizer state.

    Mixed: 2 + 2 + (4 + state), the 4 for the float32 copy that the optimizer updates.
    """
    params, grads, state = (2, 2, 4 + state) if is_mixed else (4, 4, state)
    shares = [world_size if level >= needed else 1 for needed in (3, 2, 1)]
    return params / shares[0] + grads / shares[1] + state / shares[2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_state_bytes_are_within_one_percent_of_the_formula(world_size: int, level: int) -> None:
    """After the last backward pass and before the step, in float32 and in the paper's 2 + 2 + 12.

    In half precision batch norm is whole on every rank, in float32.
    """
    num_params = sum(param.numel() for param in _Stack().parameters())
    num_norm = sum(param.numel() for block in _Stack().blocks for param in block[1].parameters())
    ratios = {}
    with _among(world_size):
        for optimizer, state in STATE.items():
            for is_mixed in (False, True):
                sharded = _shard(_Stack(), level, optimizer, MIXED if is_mixed else FLOAT32)
                _train(sharded, 1)
                memory = _train(sharded, 1)
                held = memory["params"] + memory["grads"] + memory["optimizer"]
                whole = num_norm * is_mixed
                cut = (num_params - whole) * _formula(level, is_mixed, state, world_size)
                ratios[optimizer, is_mixed] = held / (cut + whole * (4 + 4 + state))
    print(f"level {level}, {world_size} ranks: {ratios}")
    assert max(ratios.values()) <= 1.01, ratios


@pytest.mark.timeout(60)
@pytest.mark.parametrize("optimizer", STATE)
def test_optimizer_state_at_64_ranks_is_a_64th(optimizer: str) -> None:
    num_params = sum(param.numel() for param in _wide().parameters())
    held = []
    with _among(64):
        for level in (1, 2, 3):
            sharded = _shard(_wide(), level, optimizer, FLOAT32)
            for _ in range(2):
                with sharded.micro_batch(is_last=True):
                    sharded.backward(sharded.model(torch.randn(2, 128)).square().mean())
                sharded.step()
                sharded.zero_grad()
            held.append(sharded.ledger().optimizer)
    print(f"{optimizer}: {held} bytes of {num_params * STATE[optimizer]}")
    assert max(held) <= 1.01 * num_params * STATE[optimizer] / 64
    assert min(held) >= num_params * STATE[optimizer] / 64


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in ((128, 320), (320, 640), (640, 64))])
