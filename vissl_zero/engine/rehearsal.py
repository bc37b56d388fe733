"""A run built with fake tensors (shapes, no memory): what it will hold, how long it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.data.batch import Batch
from vissl_zero.data.eval_images import require_evaluation
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.engine.schedule import Frozen, Schedules
from vissl_zero.losses.criterion import build_criterion
from vissl_zero.models.model import build_model
from vissl_zero.optim.build import build_optimizer
from vissl_zero.optim.param_groups import freeze_untrainable, param_groups
from vissl_zero.registry import HOOKS, load_plugins
from vissl_zero.sharding.forecast import Forecast, forecast


@dataclass(frozen=True)
class Rehearsal:
    """What ``rehearse`` found.

    Attributes:
        plan: the resolved run.
        forecast: units and memory.
        num_params, num_trained: elements of the model, and those the optimizer updates.
        num_images, steps_per_epoch, num_steps: length of the run.
        lr_first, lr_peak, lr_last: learning rate of the trunk at the first step, at its highest and at the last step.
    """

    plan: ResolvedRun
    forecast: Forecast
    num_params: int
    num_trained: int
    num_images: int
    steps_per_epoch: int
    num_steps: int
    lr_first: float
    lr_peak: float
    lr_last: float


def rehearse(plan: ResolvedRun) -> Rehearsal:
    """Build everything but the processes. Cost: indexing the data, reading one micro-batch, a second or two."""
    load_plugins(plan.config["IMPORTS"])
    for name in plan.config["HOOKS"]["EXTRA"]:
        HOOKS.get(name)
    loader = _loader(plan)
    batch = next(loader.epoch(0))[0]
    if plan.config["NEAREST_NEIGHBOR"]["USE_KNN"] or batch.targets is not None:
        require_evaluation(plan.config["DATA"], plan.seed)
    dtype = getattr(torch, plan.sharding.precision.master)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _default_dtype(dtype):
        model = build_model(plan.config["MODEL"])
        freeze_untrainable(model, plan.config["MODEL"]["NON_TRAINABLE_PARAMS"])
        groups = param_groups(model, plan.optimizer)
        names = [name for name, _ in model.named_parameters()]
        Frozen(plan.config["MODEL"]["TEMP_FROZEN_PARAMS_ITER_MAP"], names)
        criterion = build_criterion(plan.config["LOSS"])
        fakes = _faked(batch, fake, dtype)

        def run_forward() -> torch.Tensor:
            criterion.on_step(0, 0)
            outputs = model(fakes.images, criterion.probe())
            return criterion(outputs, fakes)

        optimizer = functools.partial(build_optimizer, plan.optimizer)
        is_averaged = plan.config["HOOKS"]["EMA_MODEL"]["SAVE_EMA_MODEL"]
        found = forecast(
            model, groups, optimizer, plan.sharding, plan.world_size, plan.device, run_forward, is_averaged
        )
    num_steps = loader.steps_per_epoch * plan.num_epochs
    schedules = Schedules(plan, groups, loader.steps_per_epoch)
    rates = [schedules.lr(step) for step in range(0, num_steps, max(1, num_steps // 1000))]
    end = num_steps if plan.max_steps is None else min(num_steps, plan.max_steps)
    end = 0 if plan.config["TEST_ONLY"] else end
    return Rehearsal(
        plan=plan,
        forecast=found,
        num_params=sum(param.numel() for param in model.parameters()),
        num_trained=sum(param.numel() for param in model.parameters() if param.requires_grad),
        num_images=len(loader.source),
        steps_per_epoch=loader.steps_per_epoch,
        num_steps=end,
        lr_first=rates[0],
        lr_peak=max(rates),
        lr_last=schedules.lr(max(end - 1, 0)),
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Fake modules are made in their dtype: ``.to`` cannot replace their parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _loader(plan: ResolvedRun) -> Loader:
    data: dict[str, Any] = copy.deepcopy(dict(plan.config["DATA"]))
    data["NUM_DATALOADER_WORKERS"] = 0  # one micro-batch: no processes for that
    return build_loader(
        data,
        "TRAIN",
        seed=plan.seed,
        batch_per_rank=plan.batch_per_rank,
        rank=0,
        world_size=plan.world_size,
        accumulation_steps=plan.accumulation_steps,
    )


def _faked(batch: Batch, mode: FakeTensorMode, dtype: torch.dtype) -> Batch:
    return Batch(
        images=[mode.from_tensor(image.to(dtype)) for image in batch.images],
        num_crops=batch.num_crops,
        targets=None if batch.targets is None else mode.from_tensor(batch.targets),
        sample_ids=mode.from_tensor(batch.sample_ids),
        num_global=batch.num_global,
    )
