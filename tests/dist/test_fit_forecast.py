"""What ``level="fit"`` forecasts of a loop of one's own, beside what this process then holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero
from tests.ranks import RankError, log_messages, run_on_ranks
from vissl_zero.integration.fit import forecaster_of
from vissl_zero.planner.memory_model import StepMemory
from vissl_zero.planner.step_trace import StepTrace
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan
from vissl_zero.sharding.memory import ActivationCounter, Storages

CPU = torch.device("cpu")


def _model(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.Sigmoid(), nn.Linear(width, 3), nn.Sigmoid())


def _forecast(
    model: nn.Module, optimizer: dict[str, Any], plan: ShardingPlan, sample: Any, device: torch.device = CPU
) -> dict[str, int]:
    forecaster, mode = forecaster_of(model, optimizer, plan, sample, device)
    with mode:
        step = forecaster.forecast(plan).step
    assert step is not None
    return step.by_kind


def test_a_batch_that_a_function_brings_along_is_counted_once() -> None:
    model, images, labels = _model(32), torch.rand(8, 16), torch.zeros(8, 3)

    def loss(model: nn.Module) -> Tensor:
        # A view has no memory of its own.
        return F.l1_loss(model(images.view(4, 2, 16).flatten(0, 1)), labels)

    plan = ShardingPlan(0)
    found = _forecast(model, {"type": "SGD"}, plan, loss)
    assert found["inputs"] == images.nbytes + labels.nbytes
    given = _forecast(model, {"type": "SGD"}, plan, images)
    assert found["activations"] - given["activations"] < images.nbytes


def test_a_function_written_for_a_gpu_is_forecast_without_one() -> None:
    model, teacher, images = _model(32), _model(8).requires_grad_(False), torch.rand(8, 16)
    dtypes = set()

    def loss(model: nn.Module, device: str) -> Tensor:
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)  # as torch.autocast does; without a GPU that refuses
        torch.set_autocast_dtype(device, torch.bfloat16)
        try:
            on_device = images.cuda() if device == "cuda" else images
            outputs = model(on_device.to(device) + torch.zeros(16, device=device))
            dtypes.add(outputs.dtype)
            return F.mse_loss(outputs, teacher(images.to(outputs.device)))
        finally:
            torch.set_autocast_enabled(device, before)

    plan = ShardingPlan(0)
    here = _forecast(model, {"type": "SGD"}, plan, partial(loss, device="cpu"))
    there = _forecast(model, {"type": "SGD"}, plan, partial(loss, device="cuda"), torch.device("cuda"))
    assert there["activations"] == here["activations"] and there["inputs"] == here["inputs"]
    assert dtypes == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.l1_loss])
def test_what_a_loss_keeps_is_what_torch_keeps(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The mean of some losses is a number over the memory of all their elements."""
    model, images, labels = _model(32), torch.rand(64, 16), torch.zeros(64, 3)
    forecaster, mode = forecaster_of(
        model, {"type": "SGD"}, ShardingPlan(0), lambda net: loss(net(images), labels), CPU
    )
    with mode:
        trace = forecaster.trace(ShardingPlan(0))
    assert isinstance(trace, StepTrace)
    with ActivationCounter() as counter:
        held = loss(model(images), labels)
    kept = counter.alive_bytes(Storages([*model.parameters(), images, labels]))
    assert trace.kept_bytes == kept and held.isfinite()


HALF = Precision("float32", None, "bfloat16", "float32")


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_in_half_precision_keeps_half(given: torch.dtype) -> None:
    """Over float32 masters, as the model is given or as the images are."""
    layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64)]
    model, images = nn.Sequential(*layers).to(given), torch.rand(128, 64).to(given)
    loss = lambda net: net(images).float().square().mean()  # noqa: E731
    plan = ShardingPlan(3, precision=HALF)
    forecaster, mode = forecaster_of(model, {"type": "SGD"}, plan, loss, CPU)
    with mode:
        trace, step = forecaster.trace(plan), forecaster.forecast(plan).step
    assert all(param.dtype == given for param in model.parameters())
    assert isinstance(trace, StepTrace) and step is not None
    real = nn.Sequential(*layers).bfloat16()
    real[1].float()
    half = images.bfloat16()
    with ActivationCounter() as counter:
        outputs = real(half).float()
        held = outputs.square().mean()
    kept = counter.alive_bytes(Storages([*real.parameters(), *real.buffers(), half]))
    copied = half.nbytes * (given == torch.float32)  # as a unit casts its input
    statistics = 2 * 256 * 2  # fake kernels save those of batch norm in half precision too
    assert held.isfinite() and trace.kept_bytes == kept + copied - statistics
    assert step.by_kind["params"] > 4 * sum(param.numel() for param in model.parameters())


def _train_in_half(zero: dict[str, Any]) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.GELU()) for _ in range(8)))
    images = torch.rand(512, 512) * (1 + dist.get_rank())
    sample = (lambda net: net(images).square().mean()) if zero["level"] == "fit" else None
    with log_messages() as messages:
        model, optimizer = vissl_zero.initialize(model, {"type": "AdamW"}, zero | {"bf16": True}, sample=sample)
    losses = []
    for _ in range(3):
        loss = model(images).square().mean()
        losses.append(float(loss.detach()))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, messages


@pytest.mark.timeout(120)
def test_fit_in_half_precision_trains_what_a_level_trains() -> None:
    expected, _ = run_on_ranks(2, _train_in_half, {"level": 3})[0]
    plenty, (chosen,) = run_on_ranks(2, _train_in_half, {"level": "fit", "memory_gb": 1.0})[0]
    assert plenty == expected and len(set(expected)) == 3
    assert "took level 1: the cheapest that fits" in chosen


def _fit_to_a_batch(zero: dict[str, Any]) -> None:
    images, labels = torch.rand(4, 8), torch.zeros(4, dtype=torch.int64)
    settings = zero | {"level": "fit", "memory_gb": 1.0}
    for sample in ((images, labels), {"input": images, "labels": labels}):
        model, _ = vissl_zero.initialize(nn.Linear(8, 2), {"type": "SGD"}, settings, sample=sample)
        assert model(images).shape == (4, 2)


@pytest.mark.parametrize("zero", [{}, {"bf16": True}])
def test_labels_of_a_loader_are_no_arguments_of_the_model(zero: dict[str, Any]) -> None:
    run_on_ranks(1, _fit_to_a_batch, zero)


def test_a_budget_in_half_precision_that_is_too_little_names_the_smallest() -> None:
    with pytest.raises(RankError, match=r"is too little for every plan that trains the same .* takes .* \(level 3\)"):
        run_on_ranks(2, _train_in_half, {"level": "fit", "memory_gb": 1e-3})


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch computes an LSTM by oneDNN where it has it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 320, 512])
def test_what_an_lstm_keeps_is_counted(width: int, dtype: torch.dtype) -> None:
    model, inputs = nn.LSTM(width, 160, 2, bidirectional=True).to(dtype), torch.zeros(30, 8, width, dtype=dtype)
    formats = Precision("bfloat16", None, "bfloat16", "float32", rounding="kahan")
    plan = ShardingPlan(0, precision=formats if dtype == torch.bfloat16 else Precision())
    forecaster, mode = forecaster_of(model, {"type": "SGD"}, plan, lambda net: net(inputs)[0].float().mean(), CPU)
    with mode:
        trace = forecaster.trace(plan)
    assert isinstance(trace, StepTrace)
    with ActivationCounter() as counter:
        held = model(inputs)[0].float().mean()
    kept = counter.alive_bytes(Storages([*model.parameters(), inputs]))
    assert held.isfinite() and 0.99 * kept < trace.kept_bytes < 1.05 * kept


@pytest.mark.parametrize("tiers", ["optimizer", "both"])
@pytest.mark.parametrize("width", [8, 20_000, 100_000])
@pytest.mark.parametrize("options", [{"type": "AdamW"}, {"type": "SGD", "momentum": 0.9, "lr": 0.1}])
def test_buffers_to_a_disk_are_as_large_as_what_passes_through_them(
    tiers: str, width: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    blocks = tier, tier if tiers == "both" else {}
    plan = ShardingPlan(3, offload_optimizer=OffloadPlan(**blocks[0]), offload_params=OffloadPlan(**blocks[1]))
    model = _model(width)
    found = _forecast(model, options, plan, torch.zeros(2, 16))["offload_buffers"]
    zero = {"level": 3, "offload_optimizer_config": blocks[0], "offload_param_config": blocks[1]}
    _, optimizer = vissl_zero.initialize(model, options, zero)
    held: Any = optimizer._sharded.optimizer
    assert found == Storages(buffer for buffer in held.resident_tensors).num_bytes
    optimizer.close()


@pytest.mark.parametrize("most", [0, 3_100, 20_000, 10**9])
def test_what_max_in_cpu_keeps_is_in_memory_and_not_on_the_disk(most: int, tmp_path: Path) -> None:
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    tiers = {"offload_optimizer_config": tier, "offload_param_config": {**tier, "max_in_cpu": most}}
    model, images = _model(1000), torch.zeros(2, 16)

    def forecast(number: int) -> StepMemory:
        params = OffloadPlan(**tier, max_in_cpu=number)
        plan = ShardingPlan(3, offload_optimizer=OffloadPlan(**tier), offload_params=params)
        forecaster, mode = forecaster_of(model, {"type": "AdamW"}, plan, images, CPU)
        with mode:
            step = forecaster.forecast(plan).step
        assert step is not None
        return step

    found, without = forecast(most), forecast(0)
    _, optimizer = vissl_zero.initialize(model, {"type": "AdamW"}, {"level": 3, **tiers})
    shards = optimizer._sharded._shards.values()
    kept = sum(shard.local.nbytes for shard in shards if not shard.is_on_disk)
    held: Any = optimizer._sharded.optimizer
    assert (kept > 0) == (most > 0)
    assert min(found.timeline["params"]) == kept
    assert without.disk_bytes - found.disk_bytes == 2 * kept, "its gradients lie beside it"
    assert found.by_kind["offload_buffers"] == Storages(held.resident_tensors).num_bytes
    optimizer.close()


def test_state_that_there_is_none_of_needs_no_buffers(tmp_path: Path) -> None:
    """The base optimizer then updates all parameters at once, and takes what it takes."""
    model, images = _model(1000), torch.zeros(2, 16)
    offloaded = ShardingPlan(1, offload_optimizer=OffloadPlan("nvme", str(tmp_path)))
    found = _forecast(model, {"type": "SGD"}, offloaded, images)
    assert found == _forecast(model, {"type": "SGD"}, ShardingPlan(1), images)
    assert found["offload_buffers"] == 0
