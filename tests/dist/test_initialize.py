"""A loop of one's own through ``initialize`` trains what plain torch trains, at every level and world size."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.dist import fitted_loop
from tests.dist.own_loop import (
    Loop,
    Text,
    given_optimizer,
    loss_of,
    run_steps,
    text,
    tokens_of,
    train,
    train_normed,
    train_normed_plainly,
    train_plainly,
)
from tests.ranks import RankError, log_messages, run_on_ranks
from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.errors import CheckpointError, ConfigError, VisslZeroError

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
@pytest.mark.parametrize("level", [1, 2])
def test_fairscale_equals_plain_torch(level: int) -> None:
    loop = Loop("adamw_ready", clip=0.5, accumulation=2)
    on_fairscale = replace(loop, zero={"engine": "fairscale"})
    assert _distance(run_on_ranks(2, train, on_fairscale, level)[0], train_plainly(loop)) < TOLERANCE


def _frozen_half(level: int | None, engine: str) -> dict[str, Tensor]:
    """Weights after 3 steps of SGD over all parameters, half of them frozen; ``level`` None: plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if level is not None:
        model, optimizer = vissl_zero.initialize(model, optimizer, {"level": level, "engine": engine})
    for step in range(3):
        images = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = images if level is None else images[dist.get_rank() :: 2]
        loss = model(rows).square().mean()
        loss.backward() if level is None else optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return _cloned(model.state_dict()) if level is None else optimizer.full_state()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "engine"), [(3, "torch"), (1, "fairscale"), (2, "fairscale")])
def test_an_optimizer_may_hold_frozen_parameters(level: int, engine: str) -> None:
    assert _distance(run_on_ranks(2, _frozen_half, level, engine)[0], _frozen_half(None, "")) < TOLERANCE


def _by_parts(level: int | None, engine: str) -> dict[str, Tensor]:
    """Weights after 4 steps that call parts of the model, under a schedule of momentum; ``level`` None: plain torch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"policy": nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "value": nn.Linear(6, 2)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if level is not None:
        model, optimizer = vissl_zero.initialize(model, optimizer, {"level": level, "engine": engine})
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.05, 0.2, step_size_up=2)
    for step in range(4):
        images = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = images if level is None else images[dist.get_rank() :: 2]
        loss = model["policy"](rows).square().mean() + model["value"](rows).square().mean()
        loss.backward() if level is None else optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return _cloned(model.state_dict()) if level is None else optimizer.full_state()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "engine"), [*((n, "torch") for n in range(4)), (1, "fairscale"), (2, "fairscale")])
def test_a_loop_may_call_parts_and_cycle_momentum(level: int, engine: str) -> None:
    assert _distance(run_on_ranks(2, _by_parts, level, engine)[0], _by_parts(None, "")) < TOLERANCE


@pytest.mark.timeout(60)
def test_larc_is_the_same_at_every_level() -> None:
    loop = Loop("larc_dict", clip=0.5, accumulation=2)
    on_fairscale = replace(loop, zero={"engine": "fairscale"})
    cases = (1, loop, 0), (3, loop, 1), (2, loop, 3), (2, on_fairscale, 2)
    states = [run_on_ranks(world, train, case, level)[0] for world, case, level in cases]
    start = {name: param.detach() for name, param in text().named_parameters(remove_duplicate=False)}
    assert _distance(states[0], start) > 1e-3
    assert max(_distance(state, states[0]) for state in states[1:]) < TOLERANCE


def _resume(level: int, engine: str) -> tuple[float, bool]:
    """Distance of 2 + 4 steps with a restart in between from 6 steps, and whether the state came through a file."""
    loop = Loop("adamw_ready", clip=0.5, accumulation=2, zero={"engine": engine})
    whole = train(loop, level)

    def fresh() -> tuple[nn.Module, object]:
        model = text()
        zero = {"level": level, "clip_grad": 0.5, "gradient_accumulation_steps": 2, "engine": engine}
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
@pytest.mark.parametrize(("level", "engine"), [(0, "torch"), (2, "torch"), (3, "torch"), (2, "fairscale")])
def test_resumes_in_the_middle(level: int, engine: str) -> None:
    assert run_on_ranks(2, _resume, level, engine)[0] < TOLERANCE


@pytest.mark.timeout(60)
def test_groups_synchronized_norm_buffers_and_rates_go_through_a_checkpoint(tmp_path: Path) -> None:
    """In groups on 4 ranks, then on 2 without, then in groups; rates set by hand before a checkpoint hold after it."""
    expected = train_normed_plainly(num_steps=6, change_at=2)
    groups = {"level": 3, "shard_group_size": 2}
    first = run_on_ranks(4, train_normed, groups, str(tmp_path), range(3), 2)[0]
    second = run_on_ranks(2, train_normed, {"level": 1}, str(tmp_path), range(3, 5), 2)[0]
    third = run_on_ranks(4, train_normed, {"level": 2, "shard_group_size": 2}, str(tmp_path), range(5, 6), 2)[0]
    assert third["optimizer"] == first["optimizer"] == second["optimizer"], "a half on each of 2 + 2 ranks, as on 2"
    assert _distance(third["state"], expected) < TOLERANCE


def _save(folder: str) -> None:
    model, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 1})
    loss_of(model, tokens_of(0, 0), 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.save(folder)
    _, other = vissl_zero.initialize(text(), {"type": "AdamW"}, {"level": 1})
    with pytest.raises(CheckpointError, match="one of Adam and AdamW"):
        other.load_state_dict(optimizer.state_dict())


def _load(folder: str) -> int:
    _, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 3})
    optimizer.load(folder)
    return optimizer.num_updates


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_flipped_bit_is_not_loaded(tmp_path: Path) -> None:
    run_on_ranks(1, _save, str(tmp_path))
    (file,) = tmp_path.glob("checkpoints/step_*/rank00000.safetensors")
    data = bytearray(file.read_bytes())
    place = 8 + int.from_bytes(data[:8], "little") + 3  # of the first parameter
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(RankError, match=r"No checkpoint in .* is complete.*(?s:.*)do not fit their checksum"):
        run_on_ranks(2, _load, str(tmp_path))
    with pytest.raises(CheckpointError, match="do not fit their checksum"):
        read_foreign(tmp_path)
    with pytest.raises(RankError, match=r"holds no checkpoint\. Name the folder"):
        run_on_ranks(1, _load, str(tmp_path / "elsewhere"))
    data[place] ^= 1
    file.write_bytes(data)
    assert run_on_ranks(2, _load, str(tmp_path)) == [1, 1]


def _load_elsewhere(given: dict, folder: str, level: int) -> str:
    _, optimizer = vissl_zero.initialize(text(), given, {"level": level})
    before = optimizer.full_state()
    with pytest.raises(CheckpointError) as caught:
        optimizer.load(folder)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.full_state().items()), (
        "nothing was changed"
    )
    return str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        # Plain SGD keeps no state, so that only the options of its groups tell the two apart.
        ({"type": "SGD"}, "is of another optimizer: its groups have no dampening, momentum, nesterov"),
        ({"type": "Adam", "amsgrad": True}, "and not max_exp_avg_sq"),
        ({"type": "AdamW"}, "is of another optimizer: one of Adam and AdamW"),
    ],
)
def test_state_of_another_optimizer_is_refused(given: dict, sentence: str, tmp_path: Path) -> None:
    run_on_ranks(1, _save, str(tmp_path))
    for level in (0, 3):
        assert sentence in run_on_ranks(1, _load_elsewhere, given, str(tmp_path), level)[0]


def _take_over_elsewhere(level: int) -> str:
    plain = torch.optim.Adam(param for param in text().parameters() if param.requires_grad)
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    plain.step()
    _, optimizer = vissl_zero.initialize(text(), {"type": "AdamW"}, {"level": level})
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(plain.state_dict())
    return str(caught.value)


@pytest.mark.timeout(60)
def test_state_of_another_plain_optimizer_is_refused() -> None:
    for level in (0, 3):
        assert "one of Adam and AdamW, and this is the other" in run_on_ranks(1, _take_over_elsewhere, level)[0]


def _user_surface(level: int, engine: str) -> None:
    zero = {"level": level, "engine": engine}
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, zero)
    assert isinstance(model, Text) and isinstance(optimizer, torch.optim.Optimizer)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in text().named_parameters()]
    with torch.no_grad():
        assert model.greedy(tokens_of(0, 0)).shape == (6, 5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.full_state()
    loss_of(model, tokens_of(0, 0), 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.full_parameters() as params:
        assert params["blocks.1.mlp.0.weight"].shape == (13, 10)
        same = [torch.equal(params[name], value) for name, value in before.items()]
    assert all(same), "a learning rate set by the user must reach the update"
    assert optimizer.last_step.grad_norm > 0
    with pytest.raises(VisslZeroError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    assert optimizer.ledger().params > 0 and "level" in optimizer.describe()
    with pytest.raises(ConfigError, match=r"was already passed to initialize\(\) \(got Text\)"):
        vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": level})
    if level:
        with pytest.raises(ConfigError, match=r"zero.shard_group_size: must divide the number of ranks, 2 \(got 3\)"):
            vissl_zero.initialize(text(), {"type": "SGD"}, {"level": level, "shard_group_size": 3})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "engine"), [*((n, "torch") for n in range(4)), (1, "fairscale"), (2, "fairscale")])
def test_the_model_stays_the_users(level: int, engine: str) -> None:
    run_on_ranks(2, _user_surface, level, engine)


def _said(zero: dict) -> tuple[list[str], str]:
    with log_messages(level=logging.INFO) as messages:
        _, optimizer = vissl_zero.initialize(text(), {"type": "SGD"}, zero)
    return messages, optimizer.describe()


@pytest.mark.timeout(60)
def test_verbose_prints_the_units_and_wrap_threshold_makes_more_of_them(tmp_path: Path) -> None:
    quiet, few = run_on_ranks(2, _said, {"level": 3})[0]
    said, many = run_on_ranks(2, _said, {"level": 3, "verbose": True, "wrap_threshold": 100})[0]
    assert quiet == [] and said == [many]
    assert many.count("\n  layer") > few.count("\n  layer") == 0
    ((note,), _) = run_on_ranks(2, _said, {"level": 1, "wrap_threshold": 100})[0]
    assert note.endswith("at levels 1 and 2 on the CPU, where parameters stay whole.")
    nvme = {"offload_optimizer_config": {"device": "nvme", "nvme_path": str(tmp_path)}}
    ((note,), _) = run_on_ranks(2, _said, {"level": 1, **nvme})[0]
    assert note.endswith("device=nvme has no effect: SGD keeps no state with these settings.")


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


def _step_on_every_second_micro_batch(zero: dict) -> None:
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, {"level": 2, **zero})
    for index in range(4):
        optimizer.backward(loss_of(model, tokens_of(0, 0), 1))
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.timeout(60)
def test_a_second_micro_batch_before_a_step_is_refused_where_steps_are_counted() -> None:
    with pytest.raises(RankError, match=r"Call step\(\) and zero_grad\(\) after"):
        run_on_ranks(1, _step_on_every_second_micro_batch, {"gradient_accumulation_steps": 2})
    run_on_ranks(1, _step_on_every_second_micro_batch, {})  # gradients add up until its own step


def _evaluation_in_a_micro_batch() -> None:
    zero = {"level": 2, "gradient_accumulation_steps": 2}
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, zero)
    for _ in range(2):
        optimizer.backward(model(tokens_of(0, 0)).mean())
        with torch.no_grad():
            model(tokens_of(0, 0))  # an evaluation is no second micro-batch
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_updates == 1


@pytest.mark.timeout(60)
def test_an_evaluation_between_micro_batches_is_no_second_one() -> None:
    run_on_ranks(1, _evaluation_in_a_micro_batch)


def _state_between_micro_batches() -> None:
    zero = {"level": 2, "gradient_accumulation_steps": 2}
    model, optimizer = vissl_zero.initialize(text(), {"type": "SGD", "lr": 0.1}, zero)
    optimizer.backward(loss_of(model, tokens_of(0, 0), 1))
    optimizer.step()
    optimizer.zero_grad()
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


def _never_finite() -> tuple[int, str]:
    model, optimizer = vissl_zero.initialize(text(torch.float32), {"type": "SGD"}, {"level": 2, "fp16": True})
    optimizer._sharded._loss_scale.scale = 4.0
    with pytest.raises(VisslZeroError) as caught:
        for _ in range(40):
            optimizer.backward(loss_of(model, tokens_of(0, 0), 1) * (float("nan") if dist.get_rank() else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.num_updates, str(caught.value)


@pytest.mark.timeout(60)
def test_a_loss_that_is_never_finite_ends_all_ranks_under_loss_scaling_too() -> None:
    for num_updates, sentence in run_on_ranks(2, _never_finite):
        assert num_updates == 3, "from 4 down to 1"
        assert "even at a loss scale of 1" in sentence


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
    optimizer.zero_grad()
    return start


@pytest.mark.timeout(60)
def test_a_model_on_the_meta_device_starts_the_same_everywhere() -> None:
    states = [run_on_ranks(world, _from_meta, level)[0] for world, level in ((1, 0), (2, 0), (1, 3), (2, 3), (3, 1))]
    for state in states:
        assert all(value.isfinite().all() for value in state.values())
        assert _distance({k: v.double() for k, v in state.items()}, {k: v.double() for k, v in states[0].items()}) == 0
    weight = states[0]["layers.1.weight"]
    assert weight.std() > 0.1 and weight.abs().max() <= 0.5, "torch's own bound for a layer of 4 inputs"
    assert torch.equal(states[0]["out.weight"], states[0]["layers.0.weight"]), "still tied"


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_fit_chooses_the_plan_and_trains_the_same(tmp_path: Path) -> None:
    """Plenty of memory, too little, and the least that the refusal names."""
    expected = fitted_loop.train_plainly(2)

    def fitted(memory_gb: float, is_meta: bool) -> tuple[dict[str, Tensor], list[str]]:
        zero = {"memory_gb": memory_gb, "offload_optimizer_config": {"nvme_path": str(tmp_path)}}
        return run_on_ranks(2, fitted_loop.train_fitted, zero, is_meta, 2, timeout_s=80)[0]

    plenty, said = fitted(1.0, is_meta=False)
    assert "took level 1: the cheapest that fits" in said[0] and "zero.memory_gb" in said[0]
    assert _distance(plenty, expected) < TOLERANCE
    _, (error,) = fitted(1e-4, is_meta=True)
    found = re.search(r"Write memory_gb=([\d.]+)", error)
    assert found, error
    least, said = fitted(float(found[1]), is_meta=True)
    assert "took level 3, optimizer on nvme" in said[0]
    assert _distance(least, expected) < TOLERANCE


def test_fit_needs_a_sample_and_refuses_what_it_chooses() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="sample: must be given with level='fit'"):
        vissl_zero.initialize(model, {"type": "SGD"}, {"level": "fit", "memory_gb": 1})
    with pytest.raises(ConfigError, match=r"(?s)above 0 GiB.*keep_gradients: cannot go with level='fit'"):
        vissl_zero.initialize(model, {"type": "SGD"}, {"level": "fit", "keep_gradients": True, "memory_gb": 0})
    with pytest.raises(ConfigError, match="memory_gb: is a budget for level='fit'"):
        vissl_zero.initialize(model, {"type": "SGD"}, {"level": 1, "memory_gb": 1})


def _square_of_zeros(model: nn.Module) -> Tensor:
    return model(torch.zeros(3, 2)).square().sum()


@pytest.mark.parametrize(
    "sample",
    [torch.zeros(3, 2), (torch.zeros(3, 2), "label"), {"input": torch.zeros(3, 2), "label": 1}, _square_of_zeros],
)
def test_fit_takes_a_batch_as_a_loader_gives_it_or_a_loss(sample: object) -> None:
    model, optimizer = vissl_zero.initialize(nn.Linear(2, 2), {"type": "SGD"}, {"level": "fit"}, sample=sample)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.last_step is not None


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def _hooked_layers(num_steps: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block())
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": 3, "wrap_threshold": 60})
    for _ in range(num_steps):
        optimizer.backward(model(torch.randn(4, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return [name for name, layer in layers if layer._forward_hooks or layer._forward_pre_hooks]


def test_no_layer_keeps_the_hooks_of_the_first_passes() -> None:
    """They cost time in each pass, and torch.compile takes no unit that has them."""
    assert run_on_ranks(2, _hooked_layers, 2)[0] == ["0.first", "0.second", "1.first", "1.second"]
    assert run_on_ranks(2, _hooked_layers, 4)[0] == []


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def scores(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _plain_backward_through_a_method(zero: dict[str, Any], is_ours: bool) -> float:
    torch.manual_seed(0)
    model, optimizer = vissl_zero.initialize(_Parts(), {"type": "SGD", "lr": 0.1}, zero)
    for _ in range(2):
        loss = model.scores(torch.ones(4, 6)).float().square().mean()
        if not is_ours:
            loss.backward()
        elif dist.get_rank() == 0 or zero["level"]:  # at level 0, one rank skips its loss
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("scaled", [{"gradient_accumulation_steps": 2}, {"fp16": True}])
def test_a_plain_backward_pass_is_refused_where_the_loss_is_scaled_also_through_a_method(
    level: int, scaled: dict[str, Any]
) -> None:
    zero = {"level": level, **scaled}
    assert run_on_ranks(2, _plain_backward_through_a_method, zero, True)[0] > 0
    with pytest.raises(RankError, match=r"Call optimizer\.backward\(loss\) instead of loss\.backward\(\)"):
        run_on_ranks(2, _plain_backward_through_a_method, zero, False)


def _adversaries(level: int, trains_plainly: bool) -> list[float]:
    """Losses of a generator, under accumulation, whose critic is frozen while the loss passes through it."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, width)) for width in (8, 1)]
    zero = {"level": level, "gradient_accumulation_steps": 2} | ({} if trains_plainly else {"bf16": True})
    pairs = [vissl_zero.initialize(net, {"type": "SGD", "lr": 0.1}, zero) for net in nets]
    (generator, of_generator), (critic, of_critic) = pairs
    noise, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(6):
        fake, real = generator(torch.randn(16, 8, generator=noise)), torch.randn(16, 8, generator=noise) + 1
        of_critic.backward((critic(real) - 1).square().mean() + critic(fake.detach()).square().mean())
        of_critic.step()
        of_critic.zero_grad()
        critic.requires_grad_(False)
        loss = (critic(fake) - 1).square().mean()
        of_generator.backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        critic.requires_grad_(True)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trains_plainly", [True, False])
def test_two_models_train_each_other_under_accumulation(trains_plainly: bool) -> None:
    expected = run_on_ranks(2, _adversaries, 0, trains_plainly)[0]
    for level in (1, 2, 3):
        losses = run_on_ranks(2, _adversaries, level, trains_plainly)[0]
        assert losses == pytest.approx(expected, rel=1e-5 if trains_plainly else 0.01), level
