"""What networks that the planner had never seen got wrong: kinds, one test each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from vissl_zero.errors import ConfigError
from vissl_zero.integration.fit import forecaster_of
from vissl_zero.planner.candidates import forecast_all
from vissl_zero.planner.forecast import Forecast
from vissl_zero.planner.step_trace import StepTrace, record_step
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan
from vissl_zero.sharding.engines.cpu_communicator import MAX_BACKLOG_BYTES
from vissl_zero.sharding.model.wrap_plan import WrapPlan, plan_wrap

CPU = torch.device("cpu")


def forecast(model: nn.Module, optimizer: object, sample: object, micro_batches: int = 1) -> Forecast:
    plan = ShardingPlan(level=0)
    forecaster, mode = forecaster_of(model, optimizer, plan, sample, CPU)
    with mode:
        return forecaster.forecast(plan, micro_batches)


@pytest.mark.parametrize("build", [torch.optim.Adafactor, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RAdam])
def test_optimizers_that_read_values_are_forecast(build):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = build(model.parameters(), lr=0.1)
    found = forecast(model, optimizer, torch.zeros(4, 64))
    model(torch.zeros(4, 64)).sum().backward()
    optimizer.step()
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    assert found.step is not None
    assert found.memory.optimizer == sum(value.nbytes for value in state if isinstance(value, Tensor))


def test_an_optimizer_that_cannot_step_without_values_is_refused_in_a_sentence():
    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no values")

    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"optimizer: must step on tensors without values.*ValueError: no values"):
        forecast(model, Picky(model.parameters(), lr=0.1), torch.zeros(2, 4))


def _eager_and_whole(groups: Any) -> torch.optim.Optimizer:
    """An optimizer that scales by norms, with state from the start."""

    class Scaled(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            for param in (param for group in self.param_groups for param in group["params"]):
                self.state[param]["mean"] = torch.zeros_like(param)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in (param for group in self.param_groups for param in group["params"]):
                self.state[param]["mean"].add_(param.grad / param.grad.norm().clamp(min=1e-6))
                param.sub_(self.state[param]["mean"])

    return Scaled(groups)


def _over_the_mean(groups: Any) -> torch.optim.Optimizer:
    """An optimizer whose step looks at all tensors at once."""

    class Joint(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            total = sum(grad.sum() for grad in grads)
            for param in (param for group in self.param_groups for param in group["params"]):
                param.sub_(total)

    return Joint(groups, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "levels", "on_disk"),
    [
        ({"type": "AdamW", "lr": 0.1}, {0, 1, 2, 3}, {1, 2, 3}),
        ({"type": "Adagrad", "lr": 0.1}, {0, 1, 2, 3}, set()),
        ({"type": "SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.1}, {0, 1, 2, 3}, {1, 2, 3}),
        (_eager_and_whole, {0, 1, 2, 3}, set()),
        (_over_the_mean, {0}, set()),
    ],
)
def test_only_what_the_optimizer_can_have_is_chosen_among(
    optimizer: Any, levels: set[int], on_disk: set[int], tmp_path: Path
) -> None:
    base = ShardingPlan(0, shard_group_size=-1, offload_optimizer=OffloadPlan(nvme_path=str(tmp_path)))
    forecaster, mode = forecaster_of(nn.Linear(64, 8), optimizer, base, torch.zeros(4, 64), CPU)
    forecaster.subject.world_size = 2
    with mode:
        rows = forecast_all(forecaster, base, 1, 4)
    assert {plan.level for plan, *_ in rows} == levels
    assert {plan.level for plan, *_ in rows if plan.offload_optimizer.is_on_disk} == on_disk


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("lowest", [1, 3])
def test_parameters_computed_in_half_precision_are_so_from_a_level_on(lowest: int, world_size: int) -> None:
    formats = Precision("float32", None, "bfloat16", "float32")
    base = ShardingPlan(lowest, shard_group_size=-1, precision=formats)
    forecaster, mode = forecaster_of(nn.Linear(64, 8), {"type": "AdamW"}, base, torch.zeros(4, 64), CPU)
    forecaster.subject.world_size = world_size
    with mode:
        rows = forecast_all(forecaster, base, 1, 4)
    assert [plan.level for plan, *_ in rows] == [*range(lowest, 4)]
    assert all(forecast.step is not None and not forecast.unknown for *_, forecast in rows)


def test_an_optimizer_that_no_plan_can_have_is_refused_as_by_the_first() -> None:
    base = ShardingPlan(0, shard_group_size=-1, deterministic=True)
    forecaster, mode = forecaster_of(nn.Linear(64, 8), _over_the_mean, base, torch.zeros(4, 64), CPU)
    with mode, pytest.raises(ConfigError, match="must update each tensor from that tensor alone"):
        forecast_all(forecaster, base, 1, 4)


class Pair(nn.Module):
    """Two blocks under one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=False)
        return x


def test_marking_blocks_keeps_no_tensor_that_a_checkpoint_makes_again():
    def peak(units: WrapPlan) -> int:
        with mode:
            images = torch.zeros(64, 32, requires_grad=True)
            trace = record_step(model, units, lambda: (model(images).sum(), None), [images]).trace
        held = most = 0
        for delta in trace.deltas:
            held += delta
            most = max(most, held)
        return most

    mode = FakeTensorMode()
    with mode:
        model = Pair()
    every = plan_wrap(model, ShardingPlan(level=3, wrap_threshold=1000), 1)
    assert len(every.units) > 4
    assert peak(every) == peak(replace(every, units=every.units[-1:]))  # the root alone


def test_columns_that_a_convolution_in_float64_unfolds_are_needed():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()).double()
    images = torch.zeros(16, 8, 32, 32, dtype=torch.float64)
    plan = ShardingPlan(level=0, precision=Precision("float64", None, "float64", "float64"))
    forecaster, mode = forecaster_of(model, lambda groups: torch.optim.SGD(groups, lr=0.1), plan, images, CPU)
    with mode:
        trace = forecaster.trace(plan)
        step = forecaster.forecast(plan).step
    assert isinstance(trace, StepTrace) and step is not None
    columns = 9 * images.nbytes  # each pixel, for each of nine places of the kernel
    assert max(trace.scratch.values()) == columns
    assert step.resident_bytes > step.peak_bytes + columns // 2


def test_an_embedding_over_several_micro_batches_is_counted_once_more_alone():
    model = nn.Sequential(nn.Embedding(5000, 64), nn.Flatten(), nn.Linear(64 * 4, 4))
    step = forecast(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(8, 4, dtype=torch.int64), 4).step
    assert step is not None
    params = sum(param.nbytes for param in model.parameters())
    # Parameters, their gradients, and the new gradient of the embedding.
    assert step.peak_bytes == pytest.approx(2 * params + model[0].weight.nbytes, rel=0.02)


class Asking(nn.Module):
    """Takes a large or a small branch, by what its inputs are."""

    def __init__(self, question: Callable[[Tensor], bool], is_large: bool) -> None:
        super().__init__()
        self.question, self.is_large = question, is_large
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.repeat(64, 1) if self.question(x) is self.is_large else x).mean()


@pytest.mark.parametrize("question", [lambda x: bool((x > 0).all()), lambda x: torch.equal(x, x + 1)])
def test_of_a_question_of_yes_or_no_the_larger_branch_counts(question: Callable[[Tensor], bool]) -> None:
    def activations(model: nn.Module) -> int:
        step = forecast(model, {"type": "SGD", "lr": 0.1}, torch.zeros(8, 32)).step
        assert step is not None
        return step.by_kind["activations"]

    large, small = Asking(lambda _: True, True), Asking(lambda _: True, False)
    both = {activations(Asking(question, is_large)) for is_large in (True, False)}
    assert len(both) == 1 and both.pop() >= activations(large) > 10 * activations(small)


def test_a_number_that_a_model_asks_for_leaves_its_memory_unknown() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.repeat(int(x.sum()), 1))

    found = forecast(Counting(32, 32), {"type": "SGD", "lr": 0.1}, torch.zeros(8, 32))
    assert found.step is None and "failed; the run may fail too" in found.unknown


def test_what_fails_without_values_is_told_once_and_torch_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)  # torch's loggers do not propagate
    found = forecast(
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.AvgPool2d(3)), {"type": "SGD", "lr": 0.1}, torch.zeros(1, 1, 2, 2)
    )
    log.removeHandler(caplog.handler)
    assert "Output size is too small" in found.unknown
    assert not caplog.records


def test_a_transformer_that_asks_whether_its_mask_is_causal_is_forecast() -> None:
    model = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
    mask = model.generate_square_subsequent_mask(6)

    def loss(net: nn.Module) -> Tensor:
        return net(torch.zeros(2, 6, 32), torch.zeros(2, 6, 32), tgt_mask=mask).mean()

    assert forecast(model, {"type": "SGD", "lr": 0.1}, loss).step is not None


@pytest.mark.parametrize("num_layers", [4, 24])
def test_gradients_that_wait_for_another_rank_are_counted(num_layers: int) -> None:
    """A rank that is ahead keeps them, up to a bound, but for the first: two messages, which have slots to lie in."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(num_layers)))
    plan = ShardingPlan(1, shard_group_size=-1)
    forecaster, mode = forecaster_of(model, {"type": "SGD", "lr": 0.1}, plan, torch.zeros(1, 512), CPU)
    forecaster.subject.world_size = 2
    with mode:
        step = forecaster.forecast(plan).step
    assert step is not None and step.phase == "backward"
    layer, kept = model[0].weight.nbytes, num_layers * model[0].weight.nbytes // 2  # its part of the mean
    waiting = min((num_layers - 1) * layer, MAX_BACKLOG_BYTES)
    grads = step.by_kind["grads"] + step.by_kind["activations"]  # a new one is an activation until it is finished
    assert kept + waiting <= grads < kept + waiting + 1.1 * layer


def test_a_batch_of_no_images_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="sample: must not be empty"):
        forecast(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(0, 4))


def test_labels_are_not_passed_as_a_mask():
    class Masked(nn.Linear):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            assert attn_mask is None
            return super().forward(x)

    model = Masked(4, 4)
    sample = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    assert forecast(model, torch.optim.SGD(model.parameters(), lr=0.1), sample).step is not None
