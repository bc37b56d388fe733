"""Forecast against measured peak memory of a step on one GPU: 20 cells.

    python benchmarks/gpu_forecast.py [--models vit_s vit_b vit_l regnet_y_16gf] [--json forecast.json]

A cell trains three steps in a loop of its own, at a level, with some state on the CPU. ``level="fit"`` forecasts the
same plan from a sample. What is measured is torch's peak of allocated memory in the third step, less what was allocated
before the model. On the CPU, for a rehearsal, it is that of ``plan_accuracy.py``'s tracker.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu_step
import plan_accuracy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from vissl_zero.integration.fit import forecaster_of
from vissl_zero.resolve.resolved import OffloadPlan, ShardingPlan

OPTIMIZER = {"type": "AdamW", "lr": 1e-4}
# name: (level, tier of the optimizer, tier of parameters)
PLANS = {
    "level 0": (0, "none", "none"),
    "level 2": (2, "none", "none"),
    "level 3": (3, "none", "none"),
    "level 3, optimizer on the CPU": (3, "cpu", "none"),
    "level 3, all on the CPU": (3, "cpu", "cpu"),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Compute a loss as ``gpu_step.py`` does, in bfloat16."""
    with torch.autocast(gpu_step.DEVICE, torch.bfloat16):
        return model(x).float().square().mean()


def compared(name: str, build: Callable[[], nn.Module], batch: int, size: int, plan: str) -> dict[str, Any]:
    """Forecast, train, measure; return a row."""
    level, of_optimizer, of_params = PLANS[plan]
    device = torch.device(gpu_step.DEVICE)
    tiers = {"offload_optimizer": OffloadPlan(of_optimizer), "offload_params": OffloadPlan(of_params)}
    sharding = ShardingPlan(level, shard_group_size=-1, **tiers)
    gc.collect()
    before = gpu_step._allocated()
    with torch.device(device):
        model, x = build(), torch.randn(batch, 3, size, size)
    forecaster, mode = forecaster_of(model, OPTIMIZER, sharding, lambda copy: loss_of(copy, x), device)
    with mode:
        forecast = forecaster.forecast(sharding)
    step = forecast.step
    assert step is not None, forecast.unknown
    config = {"offload_optimizer_config": {"device": of_optimizer}, "offload_param_config": {"device": of_params}}
    model, optimizer = vissl_zero.initialize(model, OPTIMIZER, {"level": level, **config})
    with nullcontext() if device.type == "cuda" else plan_accuracy.tracked() as tracker:
        for number in range(3):
            if number == 2:
                gpu_step._reset_peak()
                if tracker is not None:
                    tracker.begin()
            optimizer.backward(loss_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    measured = gpu_step._peak() - before if tracker is None else tracker.peak
    row = {"model": name, "system": plan, "batch": batch, "forecast_bytes": step.peak_bytes, "peak_bytes": measured}
    return row | {"forecast over measured": round(step.peak_bytes / measured, 4)}


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_s", "vit_b", "vit_l", "regnet_y_16gf"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gpu_step.start()
    rows = []
    for model in given.models:
        for plan in given.plans:
            rows.append(compared(model, *gpu_step.MODELS[model], plan))
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
