"""A case trained through a strategy, on many ranks. The case is in ``case.py``, the reference in ``plain.py``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.case import (
    PROTOTYPES,
    SEED,
    Case,
    Outcome,
    build,
    ema_decay,
    forward,
    groups_of,
    loss_of,
    micro_batches,
    rows_of,
    schedule,
)
from tests.dist.plain import train_plainly
from vissl_zero import collectives
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.optim.adaptation import Adaptation, Larc, Lars
from vissl_zero.optim.elementwise import adam, adamw, sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.whole_tensor import adamw_8bit, lamb, muon
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.update.stepper import StepResult

__all__ = ["Case", "Outcome", "build", "loss_of", "micro_batches", "shard", "train_plainly", "train_step"]

WHOLE_TENSOR = {"muon": muon, "lamb": lamb, "adamw_8bit": partial(adamw_8bit, block_size=32, min_elements=50)}
# "cuda": the cells of one rank on a GPU; nccl refuses several on one card, and gloo crashes (pytorch#152645). The
# reference stays on the CPU.
DEVICE = torch.device(os.environ.get("VISSL_ZERO_TEST_DEVICE", "cpu"))
DOUBLE = Precision(master="float64", compute="float64", reduce="float64")


def shard(case: Case, level: int, **changes: Any) -> ShardedModel:
    """The model of ``case`` under a level of the torch engine, or as ``changes`` of the sharding plan say."""
    adaptations: dict[str, Adaptation] = {
        "larc": Larc(trust_coefficient=0.02, clip=False),
        "larc_clip": Larc(trust_coefficient=0.02, clip=True),
        "lars": Lars(eta=0.02),
    }
    settings = {
        "level": level,
        "clip_grad": case.clip,
        "clip_grad_per": case.clip_per,
        "float8": case.float8,
        "sync_bn_group": 0 if case.norm == "local_batch" else -1,
        "precision": Precision(case.dtype, case.autocast, case.dtype, case.dtype, use_loss_scale=case.inf_step >= 0),
        **changes,
    }
    model = build(case)
    plan = ShardingPlan(**settings)
    return (
        STRATEGIES.get(plan.engine)
        .build()
        .shard(
            model,
            groups_of(model, case),
            lambda groups: (_own_optimizer(case.optimizer, groups), adaptations.get(case.optimizer)),
            plan,
            DEVICE,
        )
    )


def _own_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The package's own, whose fused kernels must bear with shards that hold nothing."""
    if name in WHOLE_TENSOR:
        return WHOLE_TENSOR[name](groups)
    if name.startswith("adam"):
        return {"adam": adam, "adamw": adamw}[name](groups, eps=1e-3)
    return sgd(groups, momentum=0.9, nesterov=name == "nesterov")


def train_sharded(case: Case, level: int, changes: dict[str, Any] | None = None) -> Outcome:
    """The same training on this rank's samples. Every rank calls it; the state is on rank 0."""
    sharded = shard(case, level, **(changes or {}))
    outcome = Outcome()
    if case.inf_step >= 0:
        sharded._loss_scale.scale = case.first_scale  # type: ignore[attr-defined]
    for step in range(case.num_steps):
        result = train_step(sharded, case, step, outcome)
        if case.inf_step >= 0:
            assert result.skipped or step != case.inf_step
            outcome.scales.append(result.loss_scale)
        if result.skipped:
            outcome.losses[-1] = outcome.grad_norms[-1] = 0.0
        if case.ema:
            sharded.consolidate_buffers()
            sharded.average(ema_decay(step))
    if case.norm == "local_batch":
        sharded.consolidate_buffers()
    outcome.state = sharded.full_state()
    with sharded.averaged() if case.ema else nullcontext():
        outcome.state |= {f"ema:{name}": tensor for name, tensor in sharded.full_state().items() if case.ema}
    close = getattr(sharded.optimizer, "close", None)
    if close is not None:
        close()
    return outcome


@cache
def _groups(case: Case) -> dict[str, ParamGroup]:
    return {group.name: group for group in groups_of(build(case), case)}


def train_step(sharded: ShardedModel, case: Case, step: int, outcome: Outcome) -> StepResult:
    """One optimizer step; notes loss and gradient norm in ``outcome``."""
    sharded.freeze([PROTOTYPES] if step < case.frozen_steps else [])
    groups = _groups(case)
    for settings in sharded.optimizer.param_groups:
        settings["lr"], settings["weight_decay"] = schedule(case, step, groups[settings["name"]])
    batches = list(micro_batches(case, step))
    num_samples = sum(batch[0].shape[1] for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for index, batch in enumerate(batches):
        rows = rows_of(rank, world_size, batch[0].shape[1])
        images = [crops[:, rows].to(DEVICE) for crops in batch]
        set_random_key(SEED, step, rows.to(DEVICE))
        with sharded.micro_batch(is_last=index == len(batches) - 1):
            loss = loss_of(forward(sharded.model, case, images), len(rows))
            is_bad = step == case.inf_step and index == 0 and rank == world_size - 1
            sharded.backward(loss * float("inf") if is_bad else loss, len(rows) * world_size / num_samples)
        total += loss.detach().cpu() * (len(rows) / num_samples)
    result = sharded.step()
    sharded.zero_grad()
    outcome.losses.append(float(collectives.all_reduce_sum(total)))
    outcome.grad_norms.append(float(result.grad_norm))
    return result
