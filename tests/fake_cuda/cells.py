"""Train a few steps of a recipe on the CUDA device that is not there, and print what they did to it.

``LD_PRELOAD=fake_cuda.so python -m tests.fake_cuda.cells`` reads a list of cells from standard input, as JSON, and
prints a line for each: ``{"reads": [...], ...}`` of its last step, or ``{"error": ...}``.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_cuda.device import CUDA, Watch, present
from vissl_zero.config.compose import compose
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.loader import build_train_loader
from vissl_zero.engine import loop
from vissl_zero.engine.build import other_model
from vissl_zero.engine.hook import Run
from vissl_zero.engine.loop import Schedules
from vissl_zero.methods.method import Method, build_method
from vissl_zero.methods.mixing import mixing_of
from vissl_zero.models.model import build_model
from vissl_zero.optim.param_groups import build_optimizer, freeze_untrainable, param_groups
from vissl_zero.planner.forecast import fake_
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.model.precision import cast_to_master, dtype_of
from vissl_zero.sharding.torch_private import pretended_ranks

NUM_RANKS = 4
NUM_STEPS = 3  # the optimizer makes its state in the first


def main() -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for cell in json.load(sys.stdin):
        started = time.perf_counter()
        try:
            found = trained(cell["recipe"], cell["overrides"], cell.get("broken", ""))
        except Exception as error:  # noqa: BLE001 - the parent reports it
            frames = traceback.extract_tb(error.__traceback__)
            ours = [
                f"{f.filename.split('/vissl_zero/')[-1]}:{f.lineno}" for f in frames if "/vissl_zero/" in f.filename
            ]
            found = {"error": f"{type(error).__name__}: {error}"[:2000], "at": ours[-4:]}
            if "-v" in sys.argv:
                traceback.print_exc()
        print(json.dumps(found | {"seconds": round(time.perf_counter() - started, 2)}), flush=True)


def trained(recipe: str, overrides: list[str], broken: str) -> dict[str, Any]:
    """Three steps; what ``Watch`` has noted in the last."""
    plan = planned(recipe, overrides)
    with present(), pretended_ranks(NUM_RANKS), ExitStack() as stack:
        watch = Watch()
        run, schedules, batch = built(plan, stack, watch)
        run.sharded.model.train()
        if broken:
            break_(run, broken)
        with patch.object(loop, "_is_logged", lambda run, step: False):
            for step in range(NUM_STEPS):
                lr = schedules.apply(run.sharded, step)
                watch.reads, watch.uploads, watch.collectives, watch.on_host = [], [], [], 0
                loop._train_step(run, [batch] * plan.accumulation_steps, lr, (0.0, 0.0), [])
        stray = [name for name, param in run.sharded._shards.items() if param.local.device.type != "cuda"]
    return {
        "reads": watch.reads,
        "uploads": len(watch.uploads),
        "messages": len(watch.collectives),
        "on_host": watch.on_host,
        "stray": len(stray),
    }


def planned(recipe: str, overrides: list[str]) -> ResolvedRun:
    """As a machine with 4 GPUs resolves it."""
    ours = [
        "config.MACHINE.DEVICE=gpu",
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={NUM_RANKS}",
        "config.DATA.NUM_DATALOADER_WORKERS=0",
        "config.DATA.PIN_MEMORY=false",  # real memory; the fake batch is made in page-locked memory
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=4",
        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]",
    ]
    composed = compose(recipe, [*ours, *overrides])
    return resolve(
        composed.run, tempfile.gettempdir(), recipe=recipe, host=Host(num_gpus=NUM_RANKS, why_no_gpu="", num_cores=4)
    )


def built(plan: ResolvedRun, stack: ExitStack, watch: Watch) -> tuple[Run, Schedules, ImageBatch]:
    """As ``build_run``, of fake tensors: weights have no values, so none are drawn. ``stack`` gets their mode."""
    precision = plan.sharding.precision
    loader = build_train_loader(plan, 0, plan.world_size)
    num_classes = len(loader.source.class_names)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(precision.wide))
    try:
        with torch.device("meta"):
            model = build_model(plan.config.MODEL, num_classes)
            method: Method = build_method(plan.config.LOSS, len(loader.source))
            method.mixing = mixing_of(plan.config.DATA.TRAIN)
            method.views_apart = plan.config.MODEL.VIEWS_APART
            teacher = None
            if method.has_teacher:
                teacher = method.make_teacher(
                    other_model(plan, num_classes) or build_model(plan.config.MODEL, num_classes)
                )
            for part in (model, teacher):
                if part is not None:
                    cast_to_master(part, precision)
    finally:
        torch.set_default_dtype(before)
    batch, *_ = loader.first_images(4)
    stack.enter_context(HostFirst())
    for part in (model, method, teacher):
        if part is not None:
            fake_(part, CUDA)
    freeze_untrainable(model, plan.config.MODEL.NON_TRAINABLE_PARAMS)
    groups = param_groups(model, plan.optimizer)
    method.set_length(loader.steps_per_epoch * plan.num_epochs, loader.steps_per_epoch)
    stack.enter_context(watch)
    sharded = (
        STRATEGIES.get(plan.sharding.engine)
        .build()
        .shard(
            model,
            groups,
            functools.partial(build_optimizer, plan.optimizer),
            plan.sharding,
            CUDA,
            lambda part, name: None,
        )
    )
    if teacher is not None:
        sharded.adopt_teacher(teacher, method.teacher_follows, lambda part, name: None)
    run = Run(
        plan=plan,
        sharded=sharded,
        method=method,
        loader=loader,
        device=CUDA,
        rank=0,
        world_size=plan.world_size,
        steps_per_epoch=loader.steps_per_epoch,
        num_steps=100,
        first_step=-1,  # the first pass of a run is watched for layers that draw numbers: not here
    )
    shapes = [(crops * 4, *image.shape[1:]) for image, crops in zip(batch.images, batch.num_crops, strict=True)]
    fake = replace(
        batch,
        images=[
            torch.empty(shape, dtype=image.dtype, pin_memory=True)
            for shape, image in zip(shapes, batch.images, strict=True)
        ],
        changes=tuple(
            change.each(lambda t: torch.empty(t.shape, dtype=t.dtype, pin_memory=True)) for change in batch.changes
        ),
        targets=None if batch.targets is None else torch.empty(4, dtype=torch.int64),
        masks=None if batch.masks is None else torch.empty(4, *batch.masks.shape[1:], dtype=torch.uint8),
        boxes=None if batch.boxes is None else torch.empty(4 * sum(batch.num_crops), 4),
        sample_ids=torch.empty(4, dtype=torch.int64),
        num_global=4 * plan.world_size,
    )
    return run, Schedules(plan, groups, loader.steps_per_epoch), fake


class HostFirst(FakeTensorMode):
    """Makes ``torch.tensor(1, device="cuda")`` on the host, and moves it: without a GPU it cannot be made there."""

    avoid_device_init = True  # type: ignore[assignment]


def break_(run: Run, how: str) -> None:
    """Put a mistake into the step that the test must find."""
    loss = run.method.loss

    def with_host_read(*arguments: Any) -> Tensor:
        found = loss(*arguments)
        return found * float(found)

    def with_host_tensor(*arguments: Any) -> Tensor:
        return loss(*arguments) * torch.ones(3).sum(0, keepdim=True)

    def with_copy(*arguments: Any) -> Tensor:
        return loss(*arguments) + torch.zeros(2).to(CUDA).sum()

    run.method.loss = {"read": with_host_read, "tensor": with_host_tensor, "upload": with_copy}[how]  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
