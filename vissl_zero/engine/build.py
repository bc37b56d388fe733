"""From a resolved configuration to a run that can be trained: data, model, method, sharding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.data.loader import build_loader
from vissl_zero.data.seeding import seed_sample
from vissl_zero.engine.hook import Run
from vissl_zero.engine.schedule import Frozen, Schedules
from vissl_zero.methods.method import build_method
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model
from vissl_zero.optim.build import build_optimizer
from vissl_zero.optim.param_groups import freeze_untrainable, param_groups
from vissl_zero.registry import STRATEGIES

_BEFORE_TRAINING = -1  # in place of an epoch


def build_run(
    plan: ResolvedRun, device: torch.device, fill: Callable[[nn.Module], None] | None = None
) -> tuple[Run, Schedules, Frozen]:
    """Build everything one rank needs. Collective: every rank calls it, after the process group is up.

    Args:
        plan: of the run.
        device: of this rank.
        fill: puts other first weights into the whole model, alike on every rank.
    Raises:
        ConfigError, DataError: what the configuration asks for does not exist or cannot be run.
    """
    rank, world_size = collectives.rank(), collectives.world_size()
    dtype = getattr(torch, plan.sharding.precision.master)
    loader = build_loader(
        plan.config["DATA"],
        "TRAIN",
        seed=plan.seed,
        batch_per_rank=plan.batch_per_rank,
        rank=rank,
        world_size=world_size,
        accumulation_steps=plan.accumulation_steps,
        is_exact=plan.exact_accumulation,
    )
    model = build_model(plan.config["MODEL"], len(loader.source.class_names))
    initialize_(model, plan.seed)
    for head in model.heads[1:] if plan.optimizer.head_lr_factors else ():
        head.load_state_dict(model.heads[0].state_dict())  # a sweep: the rates alone differ
    for head in model.heads if model.taps is not None else ():
        initialize_(head, plan.seed)  # by its own names: each begins as a probe that is trained alone
    if fill is not None:
        fill(model)
    model.to(dtype)
    freeze_untrainable(model, plan.config["MODEL"]["NON_TRAINABLE_PARAMS"])
    groups = param_groups(model, plan.optimizer)
    names = [name for name, _ in model.named_parameters()]
    frozen = Frozen(plan.config["MODEL"]["TEMP_FROZEN_PARAMS_ITER_MAP"], names)
    method = build_method(plan.config["LOSS"], len(loader.source)).to(device=device, dtype=dtype)
    method.set_length(loader.steps_per_epoch * plan.num_epochs, loader.steps_per_epoch)
    teacher = method.make_teacher(copy.deepcopy(model)).to(dtype) if method.has_teacher else None
    strategy = STRATEGIES.get(plan.sharding.engine).build()
    factory = functools.partial(build_optimizer, plan.optimizer)
    sharded = strategy.shard(model, groups, factory, plan.sharding, device)
    if teacher is not None:
        sharded.adopt_teacher(teacher, method.teacher_follows)
    seed_sample(plan.seed, _BEFORE_TRAINING, rank)  # nothing of ours draws from now on, but a plugin may
    num_steps = 0 if plan.config["TEST_ONLY"] else loader.steps_per_epoch * plan.num_epochs
    run = Run(
        plan=plan,
        sharded=sharded,
        method=method,
        loader=loader,
        device=device,
        rank=rank,
        world_size=world_size,
        steps_per_epoch=loader.steps_per_epoch,
        num_steps=num_steps if plan.max_steps is None else min(num_steps, plan.max_steps),
    )
    return run, Schedules(plan, groups, loader.steps_per_epoch), frozen
