"""ZeRO for a custom training loop: one call, no YAML needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.config.derive.offload import offload_notes, offload_plans
from vissl_zero.config.resolved import NO_UNITS, ShardingPlan, keeps_parameters_whole
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.own_loop.fit import choose_plan
from vissl_zero.own_loop.number_formats import choose_precision
from vissl_zero.own_loop.optimizer import ZeroOptimizer
from vissl_zero.own_loop.process_group import join_ranks, training_device
from vissl_zero.own_loop.settings import read_settings
from vissl_zero.own_loop.user_optimizer import optimizer_facts, read_optimizer, unchanged_on_error
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.parameter_guard import is_marked_sharded, mark_sharded
from vissl_zero.sharding.replica_check import require_equal

M = TypeVar("M", bound=nn.Module)


def initialize(
    model: M,
    optimizer: Any,
    zero: Any,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
    sample: Any = None,
) -> tuple[M, ZeroOptimizer]:
    """Shard a model and its optimizer::

        model, optimizer = vissl_zero.initialize(model, optimizer=dict(type="Adam", lr=1e-3), zero=dict(level=3))
        loss = model(x).mean(); optimizer.backward(loss); optimizer.step(); optimizer.zero_grad()

    Every rank must call it, with equal models; ranks are those of torchrun, of the process group that is up already,
    or this process alone.

    Args:
        model: whole; changed in place and returned, and to be called as before. On the meta device, its weights are
            drawn unit by unit through ``reset_parameters``, so that a rank never holds them all.
        optimizer: ``dict(type="Adam", lr=...)``, a class, or a torch optimizer over the model's parameters.
        zero: keys of ``docs/initialize.md`` as a dict, a DictConfig or the path of a YAML file.
        device: where to train; by default the model's GPU, else this rank's, else the CPU.
        seed: of the weights of a model on the meta device.
        timeout_s: of every collective, where the process group is started here.
        sample: for ``level="fit"``: a micro-batch of a rank, as a tensor, or a tuple or dict of the model's arguments
            (what the model does not take is left out), real or on the meta device; or a function of the model that
            gives the loss.
    Returns:
        The model, and an optimizer with ``backward``, ``step`` and ``zero_grad``.
    Raises:
        ConfigError: whatever is wrong with the arguments, all problems of ``zero`` at once.
    """
    settings = read_settings(zero)
    if not isinstance(model, nn.Module):
        fix = "Give the model first: initialize(model, optimizer=..., zero=...)."
        raise ConfigError([Problem("model", type(model).__name__, "must be a torch module", fix)])
    if is_marked_sharded(model):
        fix = "Build the model again, or keep the optimizer it has."
        raise ConfigError([Problem("model", type(model).__name__, "was already passed to initialize()", fix)])
    precision, notes = choose_precision(model, settings)
    groups, build_optimizer = read_optimizer(optimizer, model)
    where = training_device(model) if device is None else torch.device(device)
    join_ranks(where, timeout_s)
    _check_groups(settings.shard_group_size, settings.level)
    tiers = settings.offload_optimizer, settings.offload_params
    optimizer_tier, param_tier = offload_plans(*tiers)
    plan = ShardingPlan(
        level=settings.level,
        engine=settings.engine,
        shard_group_size=settings.shard_group_size,
        wrap_threshold=settings.wrap_threshold,
        clip_grad=settings.clip_grad,
        sync_bn_group=-1 if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) else 0,
        sync_bn_only_marked=True,
        precision=precision,
        timeout_s=timeout_s,
        verbose=settings.verbose,
        seed=seed,
        keep_gradients=settings.keep_gradients,
        compile="inductor" if settings.compile else "",
        offload_optimizer=optimizer_tier,
        offload_params=param_tier,
    )
    tier_notes = offload_notes(*tiers, has_gpu=where.type == "cuda", root="zero")
    k = settings.gradient_accumulation_steps
    if settings.is_fitted:
        # Only rank 0's choice counts: a smaller budget of another rank would go unheard.
        require_equal("the budget", [f"{settings.memory_gb}, {settings.host_memory_gb}, {settings.disk_gb}"])
        plan, said = choose_plan(model, optimizer, plan, settings, sample, where)
        notes, tier_notes = (*notes, said), ()
    elif sample is not None:
        notes = (*notes, "sample has no effect: zero names a level.")
    # Ranks that differ would meet in different collectives and wait there until the timeout.
    require_equal("the settings of zero", _facts(plan, k))
    require_equal("the optimizer", optimizer_facts(optimizer))
    num_ranks = plan.shard_group_size if plan.shard_group_size > 1 else collectives.world_size()
    if plan.wrap_threshold and keeps_parameters_whole(plan, num_ranks, collectives.world_size(), where.type):
        notes = (*notes, f"zero.wrap_threshold{NO_UNITS}")
    _say((*settings.notes, *tier_notes, *notes))
    with unchanged_on_error(optimizer):
        sharded = STRATEGIES.get(plan.engine).build().shard(model, groups, build_optimizer, plan, where)
    _call_through(sharded.model, model)
    mark_sharded(model)
    outer = ZeroOptimizer(sharded, model, k, is_plain_refused=k > 1 or precision.use_loss_scale)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad = outer.zero_grad  # type: ignore[method-assign]  # its own knows nothing of shards
    return model, outer


def _facts(plan: ShardingPlan, accumulation_steps: int) -> list[str]:
    """What must be the same on every rank."""
    names = (
        "level",
        "engine",
        "shard_group_size",
        "wrap_threshold",
        "clip_grad",
        "precision",
        "keep_gradients",
        "compile",
        "seed",
    )
    tiers = {
        "offload_optimizer_config.device": plan.offload_optimizer.device,
        "offload_param_config.device": plan.offload_params.device,
        "gradient_accumulation_steps": accumulation_steps,
    }
    values = {name: getattr(plan, name) for name in names} | tiers
    return [f"{name}={value}" for name, value in values.items()]


def _check_groups(size: int, level: int) -> None:
    """Shard groups leave no rank over."""
    world_size = collectives.world_size()
    if level and size != -1 and world_size % size:
        must = f"must divide the number of ranks, {world_size}"
        raise ConfigError([Problem("zero.shard_group_size", str(size), must, "Leave it out to share among all ranks.")])


def _say(notes: tuple[str, ...]) -> None:
    if collectives.rank() == 0:
        for note in notes:
            logging.getLogger(__name__).warning("%s", note)


class _Body(nn.Module):
    """The forward pass of a module, without its hooks and its name."""

    def __init__(self, forward: Callable[..., Any]):
        super().__init__()
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _call_through(wrapper: nn.Module, module: nn.Module) -> None:
    """Make ``module(...)`` run as ``wrapper(...)`` does, where the engine has put a wrapper around it.

    The user keeps a model of their own class, with its attributes, methods and parameter names.
    """
    if wrapper is module:
        return
    # Were it the module itself, the wrapper's call of it would come back here without end.
    wrapper.module = _Body(module.forward)
    module.forward = lambda *args, **kwargs: wrapper(*args, **kwargs)
    # copy and pickle look for these on the object first, so that its class stays as it is for other models.
    module.__dict__["__deepcopy__"] = module.__dict__["__reduce_ex__"] = _refuse_copy


def _refuse_copy(*_: Any) -> NoReturn:
    raise VisslZeroError(
        "A model that its engine runs in a wrapper cannot be copied or pickled: a copy would run the original. Take "
        "full weights with full_state() or full_parameters(), or leave zero.engine out."
    )
