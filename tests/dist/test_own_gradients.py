"""What a loop does to gradients, groups and state by itself: as plain torch does it, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero import collectives
from vissl_zero.errors import ConfigError, VisslZeroError

RANKS = 2
LEVELS: list[dict[str, Any]] = [
    {"level": 0},
    {"level": 1},
    {"level": 1, "keep_gradients": True},
    {"level": 2},
    {"level": 3},
]
NAMES = ["0", "1", "1 kept", "2", "3"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
        self.head = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def plain_loss(model: nn.Module, step: int) -> Tensor:
    """The mean over the ranks' batches, in one process."""
    return torch.stack([model(batch(step, rank)).square().mean() for rank in range(RANKS)]).mean()


def distance(reference: nn.Module, state: dict[str, Any]) -> float:
    return max(float((value - state[name]).abs().max()) for name, value in reference.state_dict().items())


def sharded(zero: dict[str, Any], trained: str = "", **more: Any) -> tuple[Net, Any]:
    model = Net()
    params = [param for name, param in model.named_parameters() if name.startswith(trained)]
    return vissl_zero.initialize(model, torch.optim.AdamW(params, lr=1e-2), {"engine": "torch", **zero, **more})


def _step_without_gradients(zero: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = sharded(zero)
    optimizer.backward(model(batch(0, collectives.rank())).square().mean())
    optimizer.zero_grad()  # a batch that the loop drops
    optimizer.step()
    return optimizer.full_state()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("zero", LEVELS, ids=NAMES)
def test_a_step_without_gradients_changes_nothing(zero: dict[str, Any]) -> None:
    assert distance(Net(), run_on_ranks(RANKS, _step_without_gradients, zero)[0]) == 0.0


def _skip_the_last_backward(zero: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = sharded(zero, gradient_accumulation_steps=2)
    for micro in range(8):
        if micro != 3 and micro != 4:  # the second of an update, and the first of the next
            optimizer.backward(model(batch(micro, collectives.rank())).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.full_state()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", LEVELS, ids=NAMES)
def test_a_micro_batch_without_a_backward_pass_counts_as_zero(zero: dict[str, Any]) -> None:
    reference = Net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for micro in range(8):
        if micro != 3 and micro != 4:
            (plain_loss(reference, micro) / 2).backward()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert distance(reference, run_on_ranks(RANKS, _skip_the_last_backward, zero)[0]) < 1e-12


def _train_the_head_by_another_optimizer(zero: dict[str, Any], order: str) -> dict[str, Any] | str:
    try:
        model, optimizer = sharded(zero, "body")
        other = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.backward(model(batch(step, collectives.rank())).square().mean())
            (optimizer if order == "own first" else other).step()
            (other if order == "own first" else optimizer).step()
            optimizer.zero_grad()
            other.zero_grad()
    except VisslZeroError as error:
        return str(error)
    return optimizer.full_state()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("order", ["own first", "other first"])
@pytest.mark.parametrize("zero", LEVELS, ids=NAMES)
def test_what_another_optimizer_trains_is_trained_as_by_plain_torch(zero: dict[str, Any], order: str) -> None:
    reference = Net()
    optimizer = torch.optim.AdamW(reference.body.parameters(), lr=1e-2)
    other = torch.optim.SGD(reference.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        plain_loss(reference, step).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    found = run_on_ranks(RANKS, _train_the_head_by_another_optimizer, zero, order)[0]
    assert not isinstance(found, str), found
    assert distance(reference, found) < 1e-12


def _changed(model: Net, optimizer: Any, kind: str) -> None:
    rank = collectives.rank()
    loss = model(batch(0, rank)).square().mean()
    if kind == "set by hand":
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
    else:
        optimizer.backward(loss)
    if kind == "own noise":
        next(model.parameters()).grad.add_(1e-3 * rank)
    if kind == "same edit":
        for param in model.parameters():
            param.grad.mul_(0.5)
    if kind == "new groups":
        optimizer.param_groups = [{"params": list(model.head.parameters()), "lr": 0.1}]
    if kind == "new parameters":
        optimizer.param_groups[0]["params"] = list(model.head.parameters())
    if kind == "cleared state":
        optimizer.state.clear()
    if kind == "new state":
        optimizer.state = {}
    if kind == "read state":
        _ = optimizer.state[model.head.weight]["exp_avg"]
    if kind == "walked state":
        list(optimizer.state.values())
    optimizer.step()


def _attempt(zero: dict[str, Any], kind: str) -> str:
    model, optimizer = sharded(zero)
    try:
        _changed(model, optimizer, kind)
    except VisslZeroError as error:
        return str(error)
    return ""


REFUSED = {
    "set by hand": "the gradients that the loop has set|with respect to a sharded parameter",
    "own noise": "the gradients that the loop has set",
    "new groups": "param_groups was replaced",
    "new parameters": "param_groups was replaced",
    "cleared state": "optimizer.state",
    "new state": "optimizer.state",
    "read state": "optimizer.state",
    "walked state": "optimizer.state",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(
    "zero",
    [LEVELS[0], LEVELS[2], LEVELS[4], {"level": 1, "engine": "fairscale"}],
    ids=["0", "1 kept", "3", "fairscale 1"],
)
def test_what_ranks_cannot_do_by_themselves_is_refused(zero: dict[str, Any], kind: str) -> None:
    if kind == "own noise" and zero["level"] == 3:
        pytest.skip("rows are this rank's alone")
    said = run_on_ranks(RANKS, _attempt, zero, kind)
    assert any(word in said[0] + said[1] for word in REFUSED[kind].split("|")), said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", [LEVELS[0], LEVELS[2], LEVELS[4]], ids=["0", "1 kept", "3"])
def test_the_same_edit_on_every_rank_is_allowed(zero: dict[str, Any]) -> None:
    assert run_on_ranks(RANKS, _attempt, zero, "same edit") == ["", ""]


def _clip_each_micro_batch(zero: dict[str, Any]) -> str:
    model, optimizer = sharded(zero, gradient_accumulation_steps=2)
    try:
        for micro in range(2):
            optimizer.backward(model(batch(micro, collectives.rank())).square().mean())
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            optimizer.step()
    except VisslZeroError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", LEVELS, ids=NAMES)
def test_gradients_that_are_not_yet_means_cannot_be_changed(zero: dict[str, Any]) -> None:
    said = run_on_ranks(RANKS, _clip_each_micro_batch, zero)[0]
    assert "before the last micro-batch" in said or "each rank holds only its rows" in said, said


def _pending(zero: dict[str, Any]) -> None:
    model = Net()
    model(batch(0, 0)).sum().backward()
    vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, zero)


def test_gradients_from_before_initialize_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero_grad\(\)"):
        _pending({"level": 0})


def _two_backward_passes(level: int) -> str:
    model, optimizer = sharded({"engine": "fairscale", "level": level})
    try:
        for part in range(2):
            optimizer.backward(model(batch(part, collectives.rank())).square().mean())
        optimizer.step()
    except VisslZeroError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
def test_fairscale_refuses_a_second_backward_pass_where_it_would_reduce_twice() -> None:
    assert any("Two backward passes reached" in said for said in run_on_ranks(RANKS, _two_backward_passes, 2))


def _adversarial(zero: dict[str, Any]) -> list[dict[str, Any]]:
    (maker, own), (critic, others) = (sharded(zero, gradient_accumulation_steps=2) for _ in range(2))
    for micro in range(4):
        noise = batch(micro, collectives.rank())
        others.backward(critic(maker(noise).detach().repeat(1, 2)[:, :6]).square().mean())
        others.step()
        others.zero_grad()
        critic.requires_grad_(False)
        own.backward(critic(maker(noise).repeat(1, 2)[:, :6]).mean())
        critic.requires_grad_(True)
        own.step()
        own.zero_grad()
    return [own.full_state(), others.full_state()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", LEVELS, ids=NAMES)
def test_two_models_with_accumulation_pass_losses_through_each_other(zero: dict[str, Any]) -> None:
    maker, critic = Net(), Net()
    own, others = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (maker, critic))
    for micro in range(4):
        drawn = [batch(micro, rank) for rank in range(RANKS)]
        made = [maker(noise) for noise in drawn]
        loss = torch.stack([critic(one.detach().repeat(1, 2)[:, :6]).square().mean() for one in made]).mean()
        (loss / 2).backward()
        if micro % 2:
            others.step()
            others.zero_grad()
        critic.requires_grad_(False)
        (torch.stack([critic(one.repeat(1, 2)[:, :6]).mean() for one in made]).mean() / 2).backward()
        critic.requires_grad_(True)
        if micro % 2:
            own.step()
            own.zero_grad()
    found = run_on_ranks(RANKS, _adversarial, zero)[0]
    assert max(map(distance, (maker, critic), found)) < 1e-12
