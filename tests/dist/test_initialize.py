"""A loop of one's own through ``initialize`` trains what plain torch trains, at every level and world size."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import vissl_zero
from tests.dist.own_loop import Loop, Text, given_optimizer, loss_of, run_steps, text, tokens_of, train, train_plainly
from tests.ranks import run_on_ranks
from vissl_zero.errors import VisslZeroError

TOLERANCE = 1e-10
LOOPS = {
    "adam_dict": Loop(),
    "adamw_ready": Loop("adamw_ready", clip=0.5, accumulation=2),
    "sgd_class": Loop("sgd_class", clip=0.5, num_calls=2),
    "rmsprop_dict": Loop("rmsprop_dict", accumulation=3, zero={"wrap_threshold": 1}),
}


@cache
def _reference(name: str) -> dict[str, Tensor]:
    return train_plainly(LOOPS[name])


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_equals_plain_torch(name: str, world_size: int, level: int) -> None:
    state = run_on_ranks(world_size, train, LOOPS[name], level, timeout_s=45)[0]
    assert _distance(state, _reference(name)) < TOLERANCE


@pytest.mark.timeout(60)
def test_larc_is_the_same_at_every_level() -> None:
    loop = Loop("larc_dict", clip=0.5, accumulation=2)
    states = [run_on_ranks(world, train, loop, level)[0] for world, level in ((1, 0), (3, 1), (2, 3))]
    start = {name: param.detach() for name, param in text().named_parameters()}
    assert _distance(states[0], start) > 1e-3
    assert max(_distance(state, states[0]) for state in states[1:]) < TOLERANCE


def _resume(level: int) -> tuple[float, bool]:
    """Distance of 2 + 4 steps with a restart in between from 6 steps, and whether the state came through a file."""
    loop = Loop("adamw_ready", clip=0.5, accumulation=2)
    whole = train(loop, level)

    def fresh() -> tuple[nn.Module, object]:
        model = text()
        zero = {"level": level, "clip_grad": 0.5, "gradient_accumulation_steps": 2}
        return vissl_zero.initialize(model, optimizer=given_optimizer("adamw_ready", model), zero=zero)

    model, optimizer = fresh()
    run_steps(model, optimizer, loop, range(2))
    with torch.no_grad():
        saved = _cloned(optimizer.state_dict())
    model, optimizer = fresh()
    optimizer.load_state_dict(saved)
    run_steps(model, optimizer, loop, range(2, 6))
    resumed = optimizer.full_state()
    return _distance(resumed, whole) if whole else 0.0


def _cloned(tree):
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _cloned(value) for key, value in tree.items()}
    return [_cloned(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_resumes_in_the_middle(level: int) -> None:
    assert run_on_ranks(2, _resume, level)[0] < TOLERANCE


def _user_surface(level: int) -> None:
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, {"level": level})
    assert isinstance(model, Text) and isinstance(optimizer, torch.optim.Optimizer)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in text().named_parameters()]
    with torch.no_grad():
        assert model.greedy(tokens_of(0, 0)).shape == (6, 5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.full_state()
    loss_of(model, tokens_of(0, 0), 1).backward()
    optimizer.step()
    with optimizer.full_parameters() as params:
        assert params["blocks.1.mlp.0.weight"].shape == (13, 10)
        same = [torch.equal(params[name], value) for name, value in before.items()]
    assert all(same), "a learning rate set by the user must reach the update"
    assert optimizer.last_step.grad_norm > 0
    with pytest.raises(VisslZeroError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    assert optimizer.ledger().params > 0 and "level" in optimizer.describe()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", range(4))
def test_the_model_stays_the_users(level: int) -> None:
    run_on_ranks(2, _user_surface, level)


def _plain_backward(zero: dict) -> str:
    model, _ = vissl_zero.initialize(text(torch.float32), {"type": "SGD", "lr": 0.1}, {"level": 3, **zero})
    try:
        loss_of(model, tokens_of(0, 0), 1).backward()
    except VisslZeroError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_plain_backward_is_refused_where_it_would_be_wrong() -> None:
    assert "Call optimizer.backward(loss)" in run_on_ranks(1, _plain_backward, {"gradient_accumulation_steps": 2})[0]
    assert "Call optimizer.backward(loss)" in run_on_ranks(1, _plain_backward, {"fp16": True})[0]
    assert run_on_ranks(1, _plain_backward, {})[0] == ""


def _state_between_micro_batches() -> None:
    zero = {"level": 2, "gradient_accumulation_steps": 2}
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, zero)
    optimizer.backward(loss_of(model, tokens_of(0, 0), 1))
    optimizer.step()
    with pytest.raises(VisslZeroError, match=r"after 1 of 2 calls of step\(\)"):
        optimizer.state_dict()


@pytest.mark.timeout(60)
def test_state_is_refused_between_micro_batches() -> None:
    run_on_ranks(1, _state_between_micro_batches)


def _half(zero: dict) -> tuple[str, float, float]:
    model = text(torch.float32)
    model, optimizer = vissl_zero.initialize(model, {"type": "Adam", "lr": 1e-2}, zero)
    seen = []
    model.blocks[1].mlp[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    losses = []
    for _ in range(8):
        loss = loss_of(model, tokens_of(0, 0), 1)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    masters = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    assert masters == {torch.float32}
    assert losses[-1] < losses[0]
    return str(seen[0]), optimizer.last_step.loss_scale, losses[-1]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("zero", "dtype", "is_scaled"),
    [
        ({"type": "ZeroRedundancyOptimizer_Level_3", "dynamic_loss_scale": True}, "torch.float16", True),
        ({"type": "ZeroRedundancyOptimizer_Level_2", "dynamic_loss_scale": False}, "torch.float16", False),
        ({"type": "ZeroRedundancyOptimizer_Level_1"}, "torch.float32", False),
        ({"type": "ZeroRedundancyOptimizer_Level_3", "fp16": False}, "torch.float32", False),
        ({"type": "ZeroRedundancyOptimizer_Level_3", "bf16": True}, "torch.bfloat16", False),
        ({"level": 3}, "torch.float32", False),
        ({"level": 1, "bf16": True}, "torch.bfloat16", False),
        ({"level": 0, "bf16": True}, "torch.bfloat16", False),
    ],
)
def test_number_formats(zero: dict, dtype: str, is_scaled: bool) -> None:
    seen, scale, _ = run_on_ranks(2, _half, zero)[0]
    assert (seen, scale != 1.0) == (dtype, is_scaled)


class WithScalar(nn.Module):
    """A parameter without dimensions and one that no rank but the first gets rows of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.layers[0].weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.attention(x, x, x)[0]
        return self.out(self.norm(x.flatten(0, 1))) * self.scale


def _from_meta(level: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = WithScalar()
    assert all(param.is_meta for param in model.parameters())
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": level}, seed=5)
    start = optimizer.full_state()
    model(torch.ones(6, 2, 4)).square().sum().backward()
    optimizer.step()
    return start


@pytest.mark.timeout(60)
def test_a_model_on_the_meta_device_starts_the_same_everywhere() -> None:
    states = [run_on_ranks(world, _from_meta, level)[0] for world, level in ((1, 0), (2, 0), (1, 3), (2, 3), (3, 1))]
    for state in states:
        assert all(value.isfinite().all() for value in state.values())
        assert _distance({k: v.double() for k, v in state.items()}, {k: v.double() for k, v in states[0].items()}) == 0
    weight = states[0]["layers.1.weight"]
    assert weight.std() > 0.1 and weight.abs().max() <= 0.5, "torch's own bound for a layer of 4 inputs"
    assert "out.weight" not in states[0], "still tied"
