"""Trained parameters of several dtypes: each is reduced and updated in its own, at every level."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vissl_zero
from tests.dist.test_optimizers import optimizer_over
from tests.ranks import RankError, run_on_ranks
from vissl_zero import collectives
from vissl_zero.integration.user_optimizer import read_optimizer
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import Precision, ShardingPlan

NUM_STEPS = 3
Zero = dict[str, Any]
State = dict[str, Tensor]
Build = Callable[[nn.Module], torch.optim.Optimizer]


class Mixed(nn.Module):
    """A bfloat16 layer, its float32 norm, a float32 adapter, and float64 scales, in one unit."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(width)
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))
        self.is_scaled = True
        self.frozen = nn.Parameter(torch.ones(width, dtype=torch.float16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.layer(x.bfloat16()).float()) + self.up(self.down(x.float()))
        hidden = hidden.double() * self.frozen
        return torch.tanh(hidden * self.scales + self.scale if self.is_scaled else hidden)


def _model(num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(1)
    head = nn.Linear(6, 2, dtype=torch.float64)
    return nn.Sequential(nn.Sequential(*(Mixed() for _ in range(num_blocks))), head)


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Compute the loss of a rank; odd ones leave the float64 scales out."""
    for block in model.modules():
        if isinstance(block, Mixed):
            block.is_scaled = rank % 2 == 0
    return model(_batch(step, rank)).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Factors are powers of two, so that the products are exact, however kernels round.
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def _mean(of_ranks: Sequence[Tensor]) -> Tensor:
    """Average in float32 at least, and round once."""
    wide = torch.promote_types(of_ranks[0].dtype, torch.float32)
    return ((of_ranks[0].to(wide) + of_ranks[1].to(wide)) / 2).to(of_ranks[0].dtype)


def _plain(build: Build, num_micro: int = 1, clip: float | None = None, is_summed_first: bool = False) -> State:
    """Train in one process on the batches of two ranks.

    With ``is_summed_first``, each rank adds up its micro-batches, and then ranks average. Else the other way round.
    """
    model = _model()
    optimizer = build(model)
    params = [param for param in model.parameters() if param.requires_grad]
    for step in range(NUM_STEPS):
        grads = [
            [
                torch.autograd.grad(
                    _loss(model, num_micro * step + micro, rank) / num_micro, params, materialize_grads=True
                )
                for rank in range(2)
            ]
            for micro in range(num_micro)
        ]
        for index, param in enumerate(params):
            of_param = [[of_rank[index] for of_rank in of_micro] for of_micro in grads]
            if is_summed_first:
                param.grad = _mean([reduce(torch.add, of_rank) for of_rank in zip(*of_param, strict=True)])
            else:
                param.grad = reduce(torch.add, map(_mean, of_param))
        if clip is not None:
            norm = torch.stack([param.grad.double().norm() for param in params]).norm()  # type: ignore[union-attr]
            for param in params:
                param.grad *= (clip / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _train(optimizer: Any, model: nn.Module, num_micro: int) -> None:
    for step in range(NUM_STEPS):
        for micro in range(num_micro):
            optimizer.backward(_loss(model, num_micro * step + micro, collectives.rank()))
            optimizer.step()
            optimizer.zero_grad()


def _sharded(zero: Zero, name: str) -> State:
    model = _model()
    build = {"sgd": _sgd, "adam": _adam}[name]
    model, optimizer = vissl_zero.initialize(model, build(model), zero)
    formats = {key: value.dtype for key, value in model.state_dict().items()}
    assert formats == {key: value.dtype for key, value in _model().state_dict().items()}
    _train(optimizer, model, zero.get("gradient_accumulation_steps", 1))
    state = {key: value.clone() for key, value in optimizer.full_state().items()}
    optimizer.close()
    return state


LEVELS: list[Zero] = [
    {"level": 0},
    {"level": 1},
    {"level": 2},
    {"level": 3},
    {"level": 2, "keep_gradients": True},
    {"level": 3, "wrap_threshold": 1},
    {"level": 3, "offload_optimizer_config": {"device": "cpu"}, "offload_param_config": {"device": "cpu"}},
]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero", LEVELS, ids=str)
def test_bits_are_those_of_plain_torch(zero: Zero) -> None:
    expected = _plain(_sgd)
    state = run_on_ranks(2, _sharded, zero, "sgd")[0]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == state[name].dtype and torch.equal(value, state[name]), name


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero", LEVELS[:4], ids=str)
def test_accumulation_clipping_and_adam(zero: Zero) -> None:
    expected = _plain(_adam, 2, 0.05, is_summed_first=zero["level"] < 2)
    state = run_on_ranks(2, _sharded, zero | {"gradient_accumulation_steps": 2, "clip_grad": 0.05}, "adam")[0]
    for name, value in expected.items():
        assert value.dtype == state[name].dtype
        torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-10, msg=name)


def _optimizer(name: str, model: nn.Module) -> Any:
    if name in ("LARC", "LARS"):
        return {"type": name, "lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1}
    others = {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    if name == "muon":
        matrices["ns_dtype"] = "float64"
    return optimizer_over(name, [matrices, others])


def _with(name: str, levels: Sequence[int]) -> list[State]:
    states = []
    for level in levels:
        model = _model()
        model, optimizer = vissl_zero.initialize(model, _optimizer(name, model), {"level": level, "clip_grad": 0.5})
        _train(optimizer, model, 1)
        states.append(copy.deepcopy(optimizer.full_state()))
    return states


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["LARC", "LARS", "lion", "muon", "shampoo", "lamb", "adamw_8bit"])
def test_optimizers_do_the_same_at_every_level(name: str) -> None:
    expected, *others = run_on_ranks(2, _with, name, range(4))[0]
    for state in others:
        for key, value in expected.items():
            assert value.dtype == state[key].dtype
            torch.testing.assert_close(value, state[key], rtol=1e-10, atol=1e-10, msg=key)


def _in_fixed_order() -> list[State]:
    states = []
    precision = Precision("float64", None, "float64", "float64", False)
    for level in range(4):
        model = _model()
        groups, build = read_optimizer({"type": "Adam", "lr": 0.01, "eps": 1e-3}, model)
        plan = ShardingPlan(level=level, precision=precision, deterministic=True)
        strategy = STRATEGIES.get("torch").build()
        sharded = strategy.shard(model, groups, build, plan, torch.device("cpu"))
        for number in range(2 * NUM_STEPS):
            with sharded.micro_batch(is_last=number % 2 == 1):
                sharded.backward(_loss(sharded.model, number, collectives.rank()))
            if number % 2:
                sharded.step()
                sharded.zero_grad()
        states.append(copy.deepcopy(sharded.full_state()))
    return states


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [2, 3])
def test_deterministic_levels_give_the_same_bits(world_size: int) -> None:
    expected, *others = run_on_ranks(world_size, _in_fixed_order)[0]
    for state in others:
        assert [name for name, value in expected.items() if not torch.equal(value, state[name])] == []


def test_an_optimizer_with_a_constant_of_one_dtype_is_refused() -> None:
    message = r"optimizer: must be given eps where parameters of a group have several formats.*\(got Adafactor\)"
    with pytest.raises(RankError, match=message):
        run_on_ranks(2, _with, "adafactor", [3])


def _take_over(zero: Zero, number: int, folder: str) -> tuple[State, State]:
    """Go on from the last checkpoint for one step; return the model and its teacher."""
    model = _model()
    teacher = vissl_zero.ema(model, decay=0.5)
    model, optimizer = vissl_zero.initialize(model, _sgd(model), zero)
    if number:
        optimizer.load(folder)
    for step in (number, 100):
        # All of the mean is of rank 0: a power of two rounds nothing.
        share = 0 if collectives.rank() else collectives.world_size()
        optimizer.backward(_loss(model, step, rank=0) * share)
        optimizer.step()
        optimizer.zero_grad()
        if step == number:
            optimizer.save(folder)
            kept = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(kept)
    states = copy.deepcopy((optimizer.full_state(), optimizer.full_ema_state()))
    assert {param.dtype for param in teacher.parameters()} == {param.dtype for param in _model().parameters()}
    optimizer.close()
    return states


@pytest.mark.timeout(120)
def test_checkpoints_pass_between_levels_tiers_and_numbers_of_ranks(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    chain: list[tuple[int, Zero]] = [
        (1, {"level": 0}),
        (2, {"level": 3}),
        (4, {"level": 1}),
        (4, {"level": 3, "shard_group_size": 2}),
        (2, {"level": 2}),
        (2, {"level": 3, "offload_optimizer_config": nvme, "offload_param_config": nvme}),
        (1, {"level": 3}),
        (2, {"level": 0}),
    ]
    model = _model()
    teacher, optimizer = copy.deepcopy(model), _sgd(model)
    for number, (world_size, zero) in enumerate(chain):
        optimizer.zero_grad()
        _loss(model, number, rank=0).backward()
        optimizer.step()
        for averaged, param in zip(teacher.parameters(), model.parameters(), strict=True):
            averaged.data.mul_(0.5).add_(param.data, alpha=0.5)
        states = run_on_ranks(world_size, _take_over, zero, number, str(tmp_path))[0]
        for found, expected in zip(states, (model.state_dict(), teacher.state_dict()), strict=True):
            assert found.keys() == expected.keys()
            wrong = [name for name, value in expected.items() if not torch.equal(value, found[name])]
            assert not wrong, (zero, wrong)
            assert all(value.dtype == found[name].dtype for name, value in expected.items())
