"""ZeRO for a custom training loop: one call, without YAML.

Number formats follow from the model and the settings; notes report them. The ranks are those of the process group that
is up already, else those of torchrun, else this process alone.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.integration.ema import take_ema
from vissl_zero.integration.fit import choose_plan
from vissl_zero.integration.settings import ZeroSettings, read_settings
from vissl_zero.integration.sharded_optimizer import ZeroOptimizer
from vissl_zero.integration.user_optimizer import (
    optimizer_facts,
    read_optimizer,
    require_plain_step,
    unchanged_on_error,
)
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.host import rank_numbers, require_interfaces
from vissl_zero.resolve.offload import offload_notes, offload_plans
from vissl_zero.resolve.resolved import NO_UNITS, Precision, ShardingPlan, keeps_parameters_whole
from vissl_zero.sharding.allocator import return_free_pages, set_allocator
from vissl_zero.sharding.checks.replica_check import class_name, is_marked_sharded, mark_sharded, require_equal
from vissl_zero.sharding.checks.waiting import watch_calls
from vissl_zero.sharding.model.float8 import require_float8

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
    """Shard a model and its optimizer.

    For example::

        model, optimizer = vissl_zero.initialize(model, optimizer=dict(type="Adam", lr=1e-3), zero=dict(level=3))
        loss = model(x).mean(); optimizer.backward(loss); optimizer.step(); optimizer.zero_grad()

    Collective: every rank must call it, with equal models. The ranks are those of the process group that is up already,
    else those of torchrun, else this process alone.

    Args:
        model: whole model; it is changed in place and returned, and is called as before. If it is on the meta device,
            its weights are drawn unit by unit by ``reset_parameters``, so that no rank has all of them at once.
        optimizer: ``dict(type="Adam", lr=...)``, a class, or a torch optimizer over the model's parameters.
        zero: keys of ``docs/initialize.md`` as a dict, a DictConfig or the path of a YAML file.
        device: device to train on; by default the model's GPU, else this rank's GPU, else the CPU.
        seed: seed of the weights of a model on the meta device, and of stochastic rounding.
        timeout_s: timeout of every collective, in seconds, if the process group is started here.
        sample: for ``level="fit"``: one rank's micro-batch, real or on the meta device, as a tensor or as a tuple or
            dict of the model's arguments (further entries are ignored); or a function of the model that returns the
            loss.
    Returns:
        The model, and an optimizer with ``backward``, ``step`` and ``zero_grad``.
    Raises:
        ConfigError: an argument is wrong; all problems of ``zero`` are in one error.
    """
    settings = read_settings(zero)
    if not isinstance(model, nn.Module):
        fix = "Give the model first: initialize(model, optimizer=..., zero=...)."
        raise ConfigError([Problem("model", type(model).__name__, "must be a torch module", fix)])
    _require_fresh(model)
    # Before a forecast copies the model: the copy would carry the teacher's weights along.
    follower = take_ema(model)
    precision, notes = choose_precision(model, settings)
    groups, build_optimizer = read_optimizer(optimizer, model)
    where = training_device(model) if device is None else torch.device(device)
    require_float8(model, settings.float8, where, "zero.float8")
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
        # Only layers that the user has converted are synchronized. The loop relies on its other layers normalizing per
        # rank.
        sync_bn_group=-1 if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) else 0,
        sync_bn_only_marked=True,
        precision=precision,
        timeout_s=timeout_s,
        verbose=settings.verbose,
        seed=seed,
        keep_gradients=settings.keep_gradients,
        compile="inductor" if settings.compile else "",
        float8=settings.float8,
        offload_optimizer=optimizer_tier,
        offload_params=param_tier,
    )
    tier_notes = offload_notes(*tiers, has_gpu=where.type == "cuda", root="zero")
    k = settings.gradient_accumulation_steps
    if settings.is_fitted:
        # Only rank 0 chooses, so a smaller budget of another rank would be ignored.
        require_equal("the budget", [f"{settings.memory_gb}, {settings.host_memory_gb}, {settings.disk_gb}"])
        plan, note = choose_plan(model, optimizer, plan, settings, sample, where)
        notes, tier_notes = (*notes, note), ()
    elif sample is not None:
        notes = (*notes, "sample has no effect: zero names a level.")
    # Ranks with different settings would call different collectives, and wait until the timeout.
    require_equal("the settings of zero", _facts(plan, k))
    require_equal("the optimizer", optimizer_facts(optimizer))
    num_ranks = plan.ranks_per_copy(collectives.world_size())
    if plan.wrap_threshold and keeps_parameters_whole(plan, num_ranks, collectives.world_size(), where.type):
        notes = (*notes, f"zero.wrap_threshold{NO_UNITS}")
    # Hooks of the optimizer see whole parameters at level 0, as without sharding.
    if plan.level:
        require_plain_step(optimizer)
    _print_notes((*settings.notes, *tier_notes, *notes))
    if where.type == "cpu":
        set_allocator(plan)
    # Sharding puts rows into the groups of an instance. After an error the caller may call again with the same
    # instance.
    with unchanged_on_error(optimizer):
        sharded = STRATEGIES.get(plan.engine).build().shard(model, groups, build_optimizer, plan, where)
    if follower is not None:
        follower.adopt(sharded)
    _call_through(sharded.model, model)
    mark_sharded(model)
    # The whole model is freed by now. Without this its pages would stay in the process, in holes between blocks.
    return_free_pages()
    watch_calls()
    is_plain_refused = k > 1 or precision.use_loss_scale
    outer = ZeroOptimizer(sharded, model, k, is_plain_refused=is_plain_refused, follower=follower)
    if isinstance(optimizer, torch.optim.Optimizer):
        # The original method would not clear the shards' gradients.
        optimizer.zero_grad = outer.zero_grad  # type: ignore[method-assign]
    return model, outer


def _facts(plan: ShardingPlan, accumulation_steps: int) -> list[str]:
    """Return the settings that must be equal on every rank, as ``name=value``."""
    names = (
        "level",
        "engine",
        "shard_group_size",
        "wrap_threshold",
        "clip_grad",
        "precision",
        "keep_gradients",
        "compile",
        "float8",
        "seed",
    )
    tiers = {
        "offload_optimizer_config.device": plan.offload_optimizer.device,
        "offload_param_config.device": plan.offload_params.device,
        "gradient_accumulation_steps": accumulation_steps,
    }
    values = {name: getattr(plan, name) for name in names} | tiers
    return [f"{name}={value}" for name, value in values.items()]


def _require_fresh(model: nn.Module) -> None:
    """Raise ConfigError if the model is sharded already, or has lazy parameters or gradients (of this rank alone)."""
    if sharded := [name for name, module in model.named_modules() if is_marked_sharded(module)]:
        fix = (
            "Build the model again, or keep the optimizer it has. Give initialize() the whole model once, or each part."
        )
        raise ConfigError(
            [Problem("model", sharded[0] or class_name(model), "was already passed to initialize()", fix)]
        )
    if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
        fix = "Run one batch through the model first, with torch.no_grad()."
        raise ConfigError([Problem("model", lazy[0], "has a lazy layer that has seen no input", fix)])
    if begun := [name for name, param in model.named_parameters() if param.grad is not None]:
        fix = "Call model.zero_grad() first, and initialize() before the first backward pass."
        raise ConfigError([Problem("model", begun[0], "has a gradient already, of this rank alone", fix)])


def _check_groups(size: int, level: int) -> None:
    """Check that the size of shard groups divides the number of ranks."""
    world_size = collectives.world_size()
    if level and size != -1 and world_size % size:
        must = f"must divide the number of ranks, {world_size}"
        raise ConfigError([Problem("zero.shard_group_size", str(size), must, "Leave it out to share among all ranks.")])


def _print_notes(notes: tuple[str, ...]) -> None:
    if collectives.rank() == 0:
        for note in notes:
            logging.getLogger(__name__).warning("%s", note)


class _Body(nn.Module):
    """A module that runs the forward function of another module, without its hooks and submodules."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.__dict__["_body"] = module  # not as a submodule, which would be its own
        self._own_forward = module.__dict__.get("forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up in each call: a loop may set ``__class__``.
        kind: Any = type(self._body)
        run = self._own_forward or partial(kind.forward, self._body)
        return run(*args, **kwargs)


def _call_through(wrapper: nn.Module, module: nn.Module) -> None:
    """Make ``module(...)`` call the engine's ``wrapper``, if there is one.

    The user's model keeps its class, attributes, methods and parameter names.
    """
    if wrapper is module:
        return
    # If the wrapper called the module itself, the two would call each other forever.
    wrapper.module = _Body(module)
    module.forward = lambda *args, **kwargs: wrapper(*args, **kwargs)
    # On the object, where copy and pickle look first: other models of the class can still be copied.
    module.__dict__["__deepcopy__"] = module.__dict__["__reduce_ex__"] = _refuse_copy


def _refuse_copy(*_: Any) -> NoReturn:
    raise VisslZeroError(
        "A model that its engine runs in a wrapper cannot be copied or pickled: a copy would run the original. Take "
        "full weights with full_state() or full_parameters(), or leave zero.engine out."
    )


_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def choose_precision(model: nn.Module, settings: ZeroSettings) -> tuple[Precision, tuple[str, ...]]:
    """Return the number formats, and notes, from the model's dtypes and from ``fp16``, ``bf16`` and ``type=``.

    A float64 model stays in float64. A model in half precision computes in it, with float32 master weights. ``type=``
    turns float16 on at levels 2 and 3, unless ``fp16=False`` or ``bf16=True``. At level 0 half precision is autocast. A
    model of several dtypes keeps all of them.

    Raises:
        ConfigError: half precision is requested of a float64 or mixed model, or parameters are not floating-point.
    """
    # Frozen integer parameters (a quantized base, a table of indices) are not trained, so they do not count.
    numbers = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad or param.is_floating_point() or param.is_complex()
    ]
    # Reversed, so that the example of a format is the first parameter in it.
    formats = {param.dtype: name for name, param in reversed(numbers)}
    if settings.rounding:
        if formats.keys() != {torch.bfloat16}:
            must = "must have all its parameters in bfloat16 where zero.rounding is given"
            fix = "Cast it with model.bfloat16(), or leave zero.rounding out."
            raise ConfigError([Problem("model", _examples(formats), must, fix)])
        formats_of_it = Precision("bfloat16", None, "bfloat16", "float32", False, settings.rounding)
        return formats_of_it, _without_scaling(settings)
    _require_floating(formats)
    if len(formats) > 1:
        return _of_mixed(model, formats, settings), () if torch.float16 in formats else _without_scaling(settings)
    precision = _NAMES[next(iter(formats))]
    half = _half(precision, settings)
    if precision == "float64" and half and (settings.fp16 or settings.bf16):
        key = "zero.fp16" if settings.fp16 else "zero.bf16"
        fix = "Build the model in float32, or leave the key out."
        raise ConfigError([Problem(key, "True", "cannot go with a float64 model, which is trained as it is", fix)])
    refused = {"float16": settings.fp16, "bfloat16": settings.bf16}.get(precision) is False
    if refused and half == precision:
        key = "zero.fp16" if precision == "float16" else "zero.bf16"
        fix = "Cast it with model.float() for float32, or leave the key out."
        raise ConfigError([Problem(key, "False", f"contradicts the model, which is in {precision}", fix)])
    master = "float64" if precision == "float64" else "float32"
    half = None if precision == "float64" else half
    use_scale = half == "float16" and settings.dynamic_loss_scale is not False
    notes = []
    if half == "float16" and settings.is_typed and settings.fp16 is None and precision != half:
        scaling = "scaling the loss" if use_scale else "without scaling the loss"
        notes.append(f"zero.type computes in float16, {scaling}, over float32 parameters; fp16=False keeps to float32.")
    if half != "float16":
        notes += _without_scaling(settings)
    if half is None:
        return Precision(master, None, master, master, False), tuple(notes)
    if settings.level == 0:
        # Nothing is gathered at level 0, so there is no copy of a unit that could be cast.
        return Precision(master, half, master, master, use_scale), tuple(notes)
    return Precision(master, None, half, master, use_scale), tuple(notes)


def _require_floating(formats: Mapping[torch.dtype, str]) -> None:
    if not formats or not formats.keys() <= _NAMES.keys():
        fix = "Cast it, frozen parameters too: model.float()."
        raise ConfigError([Problem("model", _examples(formats), "must have floating-point parameters", fix)])


def _of_mixed(model: nn.Module, formats: Mapping[torch.dtype, str], settings: ZeroSettings) -> Precision:
    """Return the precision of a model of several dtypes: norms over all parameters use the widest dtype."""
    problems = []
    # Without float16, a note reports that dynamic_loss_scale has no effect.
    scaled = ["dynamic_loss_scale"] if torch.float16 in formats else []
    for key in ("fp16", "bf16", *scaled):
        if getattr(settings, key):
            must = "cannot go with a model of several formats, which keeps them"
            problems.append(Problem(f"zero.{key}", "True", must, "Leave it out, or cast the model to one format."))
    if settings.engine != "torch":
        fix = "Leave engine out, or cast the model to one format: model.float()."
        problems.append(Problem("zero.engine", settings.engine, "needs a model of one floating-point format", fix))
    if settings.is_fitted:
        fix = "Write level=0, 1, 2 or 3."
        problems.append(Problem("zero.level", "fit", "cannot forecast a model of several formats", fix))
    if problems:
        raise ConfigError(problems)
    trained = [param.dtype for param in model.parameters() if param.requires_grad]
    master = _NAMES[reduce(torch.promote_types, trained, torch.float32)]
    return Precision(master, None, master, master, False)


def _examples(formats: Mapping[torch.dtype, str]) -> str:
    """Return a string that names one parameter of each dtype."""
    examples = (f"{str(dtype).removeprefix('torch.')} of {name}" for dtype, name in formats.items())
    return ", ".join(sorted(examples)) or "none"


def _without_scaling(settings: ZeroSettings) -> tuple[str, ...]:
    if settings.dynamic_loss_scale is None:
        return ()
    return ("zero.dynamic_loss_scale has no effect: nothing is computed in float16.",)


def _half(precision: str, settings: ZeroSettings) -> str | None:
    if settings.bf16:
        return "bfloat16"
    if settings.fp16:
        return "float16"
    if precision in ("float16", "bfloat16"):
        return precision
    is_automatic = settings.is_typed and settings.level >= 2 and settings.fp16 is None and settings.bf16 is None
    return "float16" if is_automatic else None


_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_ranks(device: torch.device, timeout_s: float) -> None:
    """Start the default process group if there is none; it is destroyed at exit.

    Collective under torchrun. Without torchrun's environment, the group has this process alone.

    Args:
        device: device of this rank.
        timeout_s: timeout of every collective in seconds, if the group is started here.
    Raises:
        ConfigError: torchrun's environment is incomplete, or left over from another run.
    """
    if dist.is_initialized():
        return
    variables = [name for name in _TORCHRUN if name in os.environ]
    is_launched = "RANK" in variables or "WORLD_SIZE" in variables
    if is_launched and len(variables) < len(_TORCHRUN):
        missing = ", ".join(name for name in _TORCHRUN if name not in variables)
        fix = "Start the program with torchrun, or unset RANK and WORLD_SIZE to train in one process."
        raise ConfigError([Problem("environment", "", f"has {', '.join(variables)} but not {missing}", fix)])
    if is_launched:
        rank_numbers(os.environ)
    require_interfaces(os.environ)
    if device.type == "cuda":
        # Before the group starts: nccl uses the current device, which is GPU 0 on every rank until it is set.
        torch.cuda.set_device(device)
    dist.init_process_group(
        # gloo in addition to nccl: norms of tensors that are offloaded to the host are summed on the host.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        # A store in memory needs no port, which another program might use.
        store=None if is_launched else dist.HashStore(),
        rank=-1 if is_launched else 0,
        world_size=-1 if is_launched else 1,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    # torch warns at exit about a group that was not destroyed.
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def training_device(model: torch.nn.Module) -> torch.device:
    """Return the device to train on: the model's GPU, else this rank's GPU if there is one, else the CPU."""
    held = next((param.device for param in model.parameters()), torch.device("cpu"))
    if held.type == "cuda":
        return held
    if torch.cuda.is_available():
        # A launcher may show each rank only its own GPU, which then has number 0 on all of them.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
