"""The online probe: plain softmax regression by torch's Adam on the trunk's features, whatever the level and ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import OnlineProbeHook

STEPS = 6
LR = 0.03


class _Watch(Hook):
    """Keeps the features of each step; for one process without accumulation."""

    def __init__(self) -> None:
        self.features: list[Tensor] = []

    def on_step(self, run: Run, step: Step) -> None:
        assert run.evaluated_model is not None
        self.features += run.evaluated_model.kept_features


def _config(probe: bool = True) -> dict[str, Any]:
    config = make_config(USE_KNN=False)
    config["ONLINE_PROBE"] |= {"USE_PROBE": probe, "LR": LR}
    return config


def _train(level: int, world_size: int, accumulation: int = 1, probe: bool = True, engine: str = "torch") -> Any:
    """State of the probe, weights of the model, results, and features by step."""
    plan = make_plan(_config(probe), level=level, world_size=world_size, max_steps=STEPS)
    batch = plan.batch_per_rank // accumulation
    sharding = dataclasses.replace(plan.sharding, engine=engine)
    plan = dataclasses.replace(plan, sharding=sharding, batch_per_rank=batch, accumulation_steps=accumulation)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    watch, labels = _Watch(), []
    if run.probe is not None:
        learn = run.probe.learn

        def keep(features: list[Tensor], batch: Any) -> None:
            labels.append(batch.targets)
            learn(features, batch)

        run.probe.learn = keep  # type: ignore[method-assign]
    train(run, schedules, frozen, [watch, *([OnlineProbeHook()] if probe else [])])
    state = {} if run.probe is None else dict(run.probe.state_dict())
    return state, run.sharded.full_state(), run.results, watch.features, labels


@pytest.fixture(scope="module")
def alone() -> Any:
    return _train(0, 1)


def test_is_plain_softmax_regression_by_adam(alone: Any) -> None:
    state, _, results, features, labels = alone
    width, classes = features[0].shape[1], 10
    linear = nn.Linear(width, classes, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    adam = torch.optim.Adam(linear.parameters(), lr=LR)
    mean, square = features[0].mean(dim=0), features[0].square().mean(dim=0)
    for step, (rows, targets) in enumerate(zip(features[1:], labels[1:], strict=True), start=1):
        inputs = (rows - mean) / ((square - mean**2).clamp(min=0) + 1e-6).sqrt()
        adam.zero_grad()
        F.cross_entropy(linear(inputs), targets).backward()
        adam.step()
        rate = max(1 / (step + 1), 0.01)
        mean, square = mean.lerp(rows.mean(dim=0), rate), square.lerp(rows.square().mean(dim=0), rate)
    torch.testing.assert_close(state["weight"][:, :-1], linear.weight.data, rtol=0, atol=1e-10)
    torch.testing.assert_close(state["weight"][:, -1], linear.bias.data, rtol=0, atol=1e-10)
    assert results["probe_top1_by_step"][-1] == [STEPS, results["probe_top1"]]
    assert 0 <= results["probe_top1_train"] <= 1


@pytest.mark.parametrize(
    ("level", "world_size", "accumulation", "engine"),
    [(0, 2, 1, "torch"), (2, 2, 2, "torch"), (3, 4, 1, "torch"), (2, 2, 1, "fairscale")],
)
def test_is_the_same_at_every_level_on_any_number_of_ranks(
    alone: Any, level: int, world_size: int, accumulation: int, engine: str
) -> None:
    wanted = alone if accumulation == 1 else _train(0, 1, accumulation)
    for state, _, results, _, _ in run_on_ranks(world_size, _train, level, world_size, accumulation, True, engine):
        for name, value in wanted[0].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
        assert results["probe_top1_by_step"] == wanted[2]["probe_top1_by_step"]
        assert results["probe_top1_train"] == wanted[2]["probe_top1_train"]


def test_the_model_does_not_notice(alone: Any) -> None:
    _, without, results, _, _ = _train(0, 1, probe=False)
    assert "probe_top1" not in results
    for name, value in alone[1].items():
        assert torch.equal(value, without[name]), name


def test_it_is_saved_with_the_methods_state() -> None:
    run, _, _ = build_run(make_plan(_config()), torch.device("cpu"))
    assert {name for name in run.method.state_dict() if name.startswith("online_probe.")} == {
        f"online_probe.{name}" for name in ("weight", "exp_avg", "exp_avg_sq", "mean", "mean_square", "num_steps")
    }


def test_images_without_classes_are_refused() -> None:
    run, _, _ = build_run(make_plan(_config()), torch.device("cpu"))
    batch = dataclasses.replace(next(iter(run.loader.epoch(0)))[0], targets=None)
    assert run.probe is not None
    with pytest.raises(ConfigError, match="a class for each training image"):
        run.probe.learn([torch.zeros(1, 1)], batch)
