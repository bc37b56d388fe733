"""What a loop does with parameters and gradients between steps: what plain torch would do, or an error by name."""

from __future__ import annotations

import copy
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.ranks import log_messages, run_on_ranks
from vissl_zero.errors import CheckpointError, VisslZeroError
from vissl_zero.sharding.checks import waiting
from vissl_zero.sharding.state.sharded_tensor import COMPOSED, ELEMENT_WISE, NEW_TENSOR, ON_FULL_TENSOR
from vissl_zero.sharding.state.sharded_view import VIEWS

Between = Callable[[nn.Module, torch.optim.Optimizer], object]
_DOCS = Path(__file__).parents[2] / "docs" / "sharded_parameters.md"
DEVICE = torch.device("cpu")  # tests/gpu has its own


def _net() -> nn.Module:
    torch.manual_seed(0)
    # 5 rows do not divide by 2 ranks.
    net = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))
    for param in net.parameters():
        param.is_flagged = param.ndim == 1
    return net.to(DEVICE, torch.float64)


def _batch(step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(DEVICE)


def _mask() -> Tensor:
    return (torch.arange(42.0, dtype=torch.float64, device=DEVICE).view(6, 7) % 3 > 0).double()


def _train(model: nn.Module, optimizer: Any, between: Between) -> None:
    for step in range(3):
        loss = model(_batch(step)).square().mean()  # the same on all ranks
        (optimizer.backward if hasattr(optimizer, "backward") else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        between(model, optimizer)


def _assigned(model: nn.Module, _: Any) -> None:
    for param in model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


def _assigned_full(model: nn.Module, _: Any) -> None:
    model[0].weight.data = 0.25 * _mask()


@torch.no_grad()
def _through_full_tensor(model: nn.Module, _: Any) -> None:
    """What refusals tell a loop to do."""
    weight = model[0].weight
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()
    weight.copy_(full / full.norm())


@torch.no_grad()
def _masked(model: nn.Module, _: Any) -> None:
    model[0].weight.mul_(_mask())
    model[2].weight.sub_(torch.linspace(0, 1, 6, dtype=torch.float64, device=DEVICE))  # one row, for all


@torch.no_grad()
def _with_masked_copy(model: nn.Module, _: Any) -> None:
    model[0].weight.copy_(model[0].weight * _mask() + model[0].weight.abs().mean())


@torch.no_grad()
def _scaled_by_norm(model: nn.Module, _: Any) -> None:
    for param in model.parameters():
        total = param.numpy().sum() if param.device.type == "cpu" else param.sum()
        param.div_(1 + param.norm() + float(param.detach().max()) + param.numel() + total)


def _drawn_anew(model: nn.Module, _: Any) -> None:
    torch.manual_seed(3)
    model[2].reset_parameters()
    nn.init.orthogonal_(model[0].weight)
    nn.init.eye_(model[2].weight)
    nn.init.trunc_normal_(model[0].weight, std=0.1)


@torch.no_grad()
def _flagged(model: nn.Module, _: Any) -> None:
    for param in model.parameters():
        if param.is_flagged:
            param.mul_(0.5)


@torch.no_grad()
def _through_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    slow = [param.clone() for param in params]
    torch._foreach_mul_(params, 0.9)
    torch._foreach_add_(params, slow, alpha=0.05)
    params[0].clamp_(max=float(torch.stack([p.norm() for p in params]).norm()) / 20)


@torch.no_grad()
def _state_summed(model: nn.Module, _: Any) -> None:
    total = sum(float(value.sum()) for value in model.state_dict().values())
    model[0].bias.fill_(total / sum(value.numel() for value in model.state_dict().values()))


def _loaded(model: nn.Module, _: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict({name: torch.randn(tensor.shape) for name, tensor in _net().state_dict().items()})


@torch.no_grad()
def _through_views(model: nn.Module, _: Any) -> None:
    weight, flat, row = model[0].weight, model[2].weight.view(-1), model[0].weight[4]
    weight[0].mul_(2)
    weight[1:3, ::2] = 0.25
    weight.t()[2].add_(flat[:6])
    weight.chunk(2)[0].copy_(weight.chunk(2)[1])
    weight.data[weight.data > 0.3] *= 0.5
    flat[flat.abs().argsort()[:3]] = 0
    model[0].bias.add_(row.sum())  # what has been written since it was taken
    for column in weight.T:
        column.clamp_(max=0.2)
    assert row.shape == (7,) and row.dtype == torch.float64 and torch.equal(row.clone(), weight[4])
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


_EXACT: dict[str, Between] = {
    found.__name__.strip("_"): found
    for found in (
        _assigned,
        _assigned_full,
        _through_full_tensor,
        _masked,
        _through_views,
        _with_masked_copy,
        _scaled_by_norm,
        _drawn_anew,
        _flagged,
        _through_groups,
        _state_summed,
        _loaded,
    )
}


def _gaps(zero: dict[str, Any]) -> dict[str, float]:
    gaps = {}
    for name, between in _EXACT.items():
        plain, net = _net(), _net()
        _train(plain, torch.optim.Adam(plain.parameters(), lr=0.05), between)
        model, optimizer = vissl_zero.initialize(net, torch.optim.Adam(net.parameters(), lr=0.05), zero, timeout_s=60)
        _train(model, optimizer, between)
        with optimizer.full_parameters() as full:
            gaps[name] = max(
                float((full[key].to(DEVICE) - param).abs().max()) for key, param in plain.named_parameters()
            )
        optimizer.close()
    return gaps


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_a_loop_does_between_steps_is_what_plain_torch_does(level):
    for gaps in run_on_ranks(2, _gaps, {"level": level}, timeout_s=100):
        assert {name for name, gap in gaps.items() if not gap < 1e-10} == set(), gaps


def test_parameters_on_a_disk_are_read_and_written_there(tmp_path):
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"level": 3, "offload_param_config": tier, "offload_optimizer_config": tier}
    for gaps in run_on_ranks(2, _gaps, zero, timeout_s=100):
        assert {name for name, gap in gaps.items() if not gap < 1e-10} == set(), gaps


def _save(model: nn.Module, _: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def _grad_of_weight(model: nn.Module, _: Any) -> None:
    torch.autograd.grad(model(_batch(0)).sum(), model[0].weight)


def _replaced(model: nn.Module, optimizer: Any) -> None:
    kept = model[2]
    model[2] = nn.Linear(6, 5).double()
    try:
        optimizer.backward(model(_batch(0)).sum())
        optimizer.step()
    finally:
        model[2] = kept
        optimizer.zero_grad()


def _twice(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(_batch(0)).sum())
    optimizer.step()
    optimizer.step()


_REFUSED: dict[str, tuple[Between, str]] = {
    "a view with gradients": (lambda model, _: model[0].weight[0].mul_(2), r"mul_\(\).* inside torch.no_grad"),
    "not in the table": (lambda model, _: model[0].weight.logit(), "is not in the table"),
    "another's view": (lambda model, _: setattr(model[0].bias, "data", model[0].weight[:, 0]), "another parameter's"),
    "saved": (_save, r"optimizer\.full_state\(\)"),
    "another's memory": (
        lambda model, _: setattr(model[2].bias, "data", model[2].bias.data[:0]),
        r"of the parameter's shape \(5,\)",
    ),
    "grad of a weight": (_grad_of_weight, "torch.autograd.grad"),
    "converted": (lambda model, _: model.float(), "before initialize"),
    "layer replaced": (_replaced, r"2\.weight is not in the model"),
    "second step": (_twice, "after optimizer.step"),
    "torch.func": (lambda model, _: torch.func.jacrev(model)(_batch(0)), "runs inside torch.func"),
    "kept from before": (lambda model, _: model.old[0] + 1, "as it was before initialize"),
}


def _refusals() -> dict[str, str]:
    net = _net()
    old = list(net.parameters())
    model, optimizer = vissl_zero.initialize(net, {"type": "SGD", "lr": 0.1}, {"level": 3}, timeout_s=60)
    model.__dict__["old"] = old
    found = {}
    for name, (use, _) in _REFUSED.items():
        try:
            with torch.enable_grad():
                use(model, optimizer)
        except VisslZeroError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def test_what_is_not_in_the_table_is_refused_by_name():
    for found in run_on_ranks(2, _refusals, timeout_s=60):
        for name, (_, words) in _REFUSED.items():
            assert re.search(words, found[name]), (name, found[name])


def _facts_of_gradients(level: int) -> list[Any]:
    net = _net()
    model, optimizer = vissl_zero.initialize(net, {"type": "SGD", "lr": 0.1}, {"level": level}, timeout_s=60)
    assert model[0].weight.grad is None
    optimizer.backward(model(_batch(0)).square().mean())
    optimizer.step()
    grad = model[0].weight.grad
    assert grad is not None
    facts = [tuple(grad.shape), grad.dtype, grad.device.type, grad.is_leaf, grad.is_sparse]
    try:
        grad.norm()
    except VisslZeroError as error:
        facts.append(str(error))
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    return facts


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_gradient_that_is_gone_has_facts_and_no_values(level):
    *facts, last = run_on_ranks(2, _facts_of_gradients, level, timeout_s=60)[0]
    assert facts[:3] == [(6, 7), torch.float64, "cpu"]
    if level == 0:
        assert last is False  # it can be used
    else:
        assert "after optimizer.step()" in last and "levels 1 to 3" in last


def _teacher_gap(level: int, folder: str, by_dict: bool) -> list[float]:
    plain, net = _net(), _net()
    reference = copy.deepcopy(plain).requires_grad_(False)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    outside = copy.deepcopy(net).requires_grad_(False)  # a plain copy, moved by the loop's own line
    teacher = vissl_zero.ema(net, decay=lambda updates: 0.8 + 0.05 * updates)
    model, optimizer = vissl_zero.initialize(net, {"type": "Adam", "lr": 0.05}, {"level": level}, timeout_s=60)

    def step(student: nn.Module, target: nn.Module, optimizer: Any, backward: Any, number: int) -> None:
        with torch.no_grad():
            wanted = target(_batch(number + 10))
        backward((student(_batch(number)) - wanted).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def move(target: nn.Module, student: nn.Module, number: int) -> None:
        decay = 0.8 + 0.05 * (number + 1)
        for own, value in zip(target.parameters(), student.parameters(), strict=True):
            own.mul_(decay).add_(value, alpha=1 - decay)

    for number in range(3):
        step(plain, reference, plain_optimizer, torch.Tensor.backward, number)
        move(reference, plain, number)
        step(model, teacher, optimizer, optimizer.backward, number)
        move(outside, model, number)
    optimizer.save(folder)
    kept = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        step(model, teacher, optimizer, optimizer.backward, 7)
    optimizer.load_state_dict(kept) if by_dict else optimizer.load(folder)
    state, wanted = optimizer.full_ema_state(), reference.state_dict()
    gaps = [
        float((own - value).abs().max())
        for own, value in zip(outside.parameters(), reference.parameters(), strict=True)
    ]
    if dist.get_rank() == 0:
        assert state.keys() == wanted.keys()
        gaps += [float((state[name].to(DEVICE) - value).abs().max()) for name, value in wanted.items()]
    return gaps


def _loads_without(saved_with: bool, folder: str) -> list[str]:
    """What loading says to a loop without the teacher that was saved, or with one that was not saved."""

    def build(has_teacher: bool) -> Any:
        net = _net()
        if has_teacher:
            vissl_zero.ema(net, decay=0.5)
        with torch.no_grad():
            net[0].weight.mul_(1 + has_teacher)  # so that a load would show
        return vissl_zero.initialize(net, {"type": "Adam", "lr": 0.05}, {"level": 3})

    (_kept, saved), (_kept_too, other) = build(saved_with), build(not saved_with)
    saved.save(folder)
    before = other.full_state()
    said = []
    for load in (lambda: other.load(folder), lambda: other.load_state_dict(saved.state_dict())):
        with pytest.raises(CheckpointError) as caught:
            load()
        said.append(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in other.full_state().items()), "nothing was changed"
    return said


@pytest.mark.parametrize(
    ("saved_with", "sentences"),
    [
        (True, ["holds a momentum teacher, and this model has none"] * 2),
        (False, ["the teacher's parameters missing from it", "has no teacher"]),
    ],
)
def test_a_teacher_is_not_dropped_or_made_up_by_loading(saved_with, sentences, tmp_path):
    for sentence, said in zip(sentences, run_on_ranks(1, _loads_without, saved_with, str(tmp_path))[0], strict=True):
        assert sentence in said


@pytest.mark.parametrize("by_dict", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_teacher_is_sharded_moved_saved_and_loaded_with_the_model(level, by_dict, tmp_path):
    for gaps in run_on_ranks(2, _teacher_gap, level, str(tmp_path), by_dict, timeout_s=60):
        assert max(gaps) < 1e-10, gaps


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state["renamed"] = state.pop("layers.0.bias")


class _Counted(nn.Module):
    """Extra state, one module with buffers in two places, and a hook that renames."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6)
        self.layers = nn.Sequential(nn.Linear(7, 6), norm, nn.Linear(6, 6), norm)
        self.num_seen = 0
        self.register_state_dict_post_hook(
            lambda _, state, prefix, __: state.update(renamed=state.pop("layers.0.bias"))
        )

    def get_extra_state(self) -> int:
        return self.num_seen

    def set_extra_state(self, state: int) -> None:
        self.num_seen = state

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += 1
        return self.layers(x)


def _full_states(level: int) -> tuple[list[str], list[str], Any, str]:
    torch.manual_seed(0)
    net = _Counted().double()
    names = list(net.state_dict())
    model, optimizer = vissl_zero.initialize(net, {"type": "SGD", "lr": 0.1}, {"level": level}, timeout_s=60)
    optimizer.backward(model(_batch(0)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.full_state()
    try:
        optimizer.save("never_written")
    except VisslZeroError as error:
        return names, list(state), state.get("_extra_state"), str(error)
    return names, list(state), None, ""


@pytest.mark.parametrize("level", [0, 2, 3])
def test_full_state_is_the_state_dict_of_the_plain_model(level):
    (names, found, extra, error), *_ = run_on_ranks(2, _full_states, level, timeout_s=60)
    assert found == names and extra == 1
    assert "extra state of the model (_Counted.get_extra_state)" in error


def _call_on_one_rank() -> str:
    _, optimizer = vissl_zero.initialize(_net(), {"type": "SGD", "lr": 0.1}, {"level": 3}, timeout_s=60)
    with patch.object(waiting, "AFTER_S", 0.5), log_messages(waiting.__name__) as messages:
        if dist.get_rank() == 1:
            time.sleep(2.5)
        optimizer.full_state()
    return " ".join(messages)


@pytest.mark.slow
def test_a_call_that_one_rank_makes_is_named_while_it_waits():
    first, second = run_on_ranks(2, _call_on_one_rank, timeout_s=60)
    assert "Rank 0 waits in optimizer.full_state()" in first and "the same number of batches" in first
    assert second == ""


def test_the_documentation_has_the_table():
    found = {}
    for line in _DOCS.read_text().splitlines():
        title, names = [*line.strip("| ").split(" | "), ""][:2]
        if names.startswith("`"):
            found[title] = " ".join(re.findall(r"`(\w+)`", names))
    for table in (COMPOSED, ELEMENT_WISE, ON_FULL_TENSOR, NEW_TENSOR, VIEWS):
        assert {title: found.get(title) for title in table} == table
