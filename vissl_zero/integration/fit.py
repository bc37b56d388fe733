"""``level="fit"`` for a custom loop: choose the cheapest plan within a memory budget that trains the same model.

One forward and backward pass over a sample is recorded on a copy of the model with fake tensors, which have shapes but
no memory. Only levels and offload tiers are chosen; recomputation and micro-batches are up to the loop.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.integration.settings import ZeroSettings
from vissl_zero.integration.user_optimizer import read_optimizer
from vissl_zero.optim.update_rule import set_own
from vissl_zero.planner.candidates import (
    Budget,
    because,
    chosen_of,
    forecast_all,
    kept_in_part,
    nothing_fits,
    rank_candidates,
)
from vissl_zero.planner.forecast import Forecaster, Subject, fake_
from vissl_zero.resolve.host import RESERVE, free_memory
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import cast_to_master

_GIB = 2**30


def choose_plan(
    model: nn.Module, optimizer: Any, base: ShardingPlan, settings: ZeroSettings, sample: Any, device: torch.device
) -> tuple[ShardingPlan, str]:
    """Return the cheapest plan that fits, and a note with the reason. Collective; all ranks get rank 0's choice.

    Args:
        model: whole model on any device; not changed.
        optimizer: see ``initialize``; not changed.
        base: plan with number formats, shard groups and clipping, and with a folder if state may be offloaded to disk.
        settings: settings with the budget.
        sample: see ``initialize``.
        device: device to train on.
    Raises:
        ConfigError: no plan fits (the error has the smallest sufficient memory), or no forecast is possible.
    """
    if base.precision.casts_parameters:
        base = replace(base, level=1)  # level 0 would use autocast instead of casts, which trains a different model
    budget = _budget(settings, device)
    outcome: tuple[ShardingPlan, str] | ConfigError
    try:
        # The recorded pass may draw random numbers. The loop must draw the same ones as without a forecast.
        with torch.random.fork_rng(devices=[]):
            forecaster, mode = forecaster_of(model, optimizer, base, sample, device)
            with mode:
                plans = forecast_all(forecaster, base, settings.gradient_accumulation_steps, 0)
                ranked = rank_candidates(plans, budget, collectives.world_size())
                if (first := chosen_of(ranked)) is not None:
                    # Only for the plan that was chosen, because each try is a forecast.
                    plans += kept_in_part(first, budget, forecaster)
            ranked = rank_candidates(plans, budget, collectives.world_size())
        chosen = chosen_of(ranked)
        if chosen is None:
            words = {"block": "zero.", "level": "level", "memory": "memory_gb"}
            is_named = base.offload_optimizer.nvme_path or base.offload_params.nvme_path
            disk = "" if is_named else ", name a disk (offload_optimizer_config=dict(nvme_path=...))"
            others = ", or give smaller micro-batches"
            raise ConfigError([nothing_fits(ranked, budget, disk=disk, others=others, **words)])
        outcome = chosen.sharding, f"zero.level=fit took {chosen}: {because(ranked, budget)}"
    # Broadcast like a choice: if rank 0 raised alone, the other ranks would wait for its choice.
    except ConfigError as error:
        outcome = error
    outcome = collectives.broadcast_object(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def forecaster_of(
    model: nn.Module, optimizer: Any, base: ShardingPlan, sample: Any, device: torch.device
) -> tuple[Forecaster, FakeTensorMode]:
    """Return a forecaster of plans over these ranks, and the mode to call it in. Not a collective.

    Args:
        model, optimizer, base, sample, device: as for ``choose_plan``.
    Raises:
        ConfigError: there is no sample, or the model cannot be copied.
    """
    if sample is None:
        fix = "Give one micro-batch of a rank: initialize(..., sample=batch); tensors on the meta device will do."
        raise ConfigError([Problem("sample", "", "must be given with level='fit'", fix)])
    # Plain tensors of modules (neither parameters nor buffers) and tensors of functions stay real.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = _meta_copy(model)
    as_given = _meta_copy(model) if callable(sample) else None
    cast_to_master(fake, base.precision)
    with mode:
        fake_(fake)
        if as_given is not None:
            fake_(as_given)
            batch = _OnHost(sample, device.type)
            # This call only collects tensors; an error is raised again, and reported, when the pass is recorded.
            with suppress(Exception), torch.no_grad():
                batch(as_given)
            leaves = batch.fakes
        else:
            batch = pytree.tree_map(_fake, sample)
            leaves = pytree.tree_leaves(batch)
    groups, build_optimizer = read_optimizer(_shallow_copy(optimizer), model)
    # The signature of the original: the copy's forward is wrapped.
    parameters = [*inspect.signature(model.forward).parameters.values()]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if empty := [str(tuple(leaf.shape)) for leaf in inputs if not leaf.numel()]:
        fix = "Give one micro-batch as the loop trains it."
        raise ConfigError([Problem("sample", empty[0], "must not be empty", fix)])
    subject = Subject(
        model=fake,
        groups=groups,
        build_optimizer=build_optimizer,
        world_size=collectives.world_size(),
        num_nodes=_num_nodes(),
        device_type=device.type,
        run_forward=lambda: _forward(fake, batch, parameters),
        inputs=inputs,
        may_recompute=False,
    )
    with mode:
        return Forecaster(subject, base), mode


def _budget(settings: ZeroSettings, device: torch.device) -> Budget:
    """Return the budget of the rank with the least memory. Collective."""
    host, disk = (None if gib is None else int(gib * _GIB) for gib in (settings.host_memory_gb, settings.disk_gb))
    if settings.memory_gb is not None:
        return Budget(int(settings.memory_gb * _GIB), host, disk, "zero.memory_gb")
    if device.type == "cuda":
        memory, what = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    else:
        memory, what = free_memory() // _local_ranks(), f"what is free over {_local_ranks()} ranks"
    # One plan holds for all ranks, so it must fit the rank with the least memory.
    least = min(collectives.all_gather_number(max(0, memory - RESERVE), device))
    return Budget(least, host, disk, f"{what}, less {RESERVE / _GIB:g} GiB")


def _num_nodes() -> int:
    return max(1, collectives.world_size() // _local_ranks())


def _local_ranks() -> int:
    # Only torchrun sets it. Without it, all ranks count as ranks of this machine, which makes the budget too small at
    # worst.
    return int(os.environ.get("LOCAL_WORLD_SIZE", collectives.world_size()))


class _OnHost(TorchFunctionMode):
    """Calls a function that was written for any device on the fake CPU copy of the model.

    The function's own tensors are replaced by fakes, devices by the CPU, and autocast of ``device_type`` by the CPU's.
    """

    def __init__(self, sample: Callable[..., Tensor], device_type: str) -> None:
        super().__init__()
        self._sample, self._device_type = sample, device_type
        # Values keep the real tensors alive, because Python reuses the id of a freed object.
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def fakes(self) -> list[Tensor]:
        """Return the fakes of the function's own tensors, including parameters of other models."""
        return [fake for _, fake in self._fakes.values()]

    def __call__(self, model: nn.Module) -> Tensor:
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        try:
            with self:
                return self._sample(model)
        finally:
            self._set_autocast(*before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device_type != "cpu":
            # At every operation: the function may enter and leave autocast of its device between two of them.
            kind = self._device_type
            self._set_autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        args, kwargs = pytree.tree_map(self._on_host, (args, kwargs or {}))
        # Tensor.cuda() names no device that could be replaced, and would start CUDA.
        return args[0] if func is Tensor.cuda else func(*args, **kwargs)

    @staticmethod
    def _set_autocast(is_on: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled("cpu", is_on)
        torch.set_autocast_dtype("cpu", dtype)

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            return self._fakes.setdefault(id(leaf), (leaf, _fake(leaf)))[1]
        kind = leaf.type if isinstance(leaf, torch.device) else leaf
        return "cpu" if isinstance(kind, str) and kind.startswith("cuda") else leaf


def _fake(leaf: Any) -> Any:
    """Return a fake CPU tensor for a tensor, and other values unchanged. Call it in ``FakeTensorMode``."""
    if not isinstance(leaf, Tensor):
        return leaf
    return _empty(leaf, "cpu")


def _empty(tensor: Tensor, device: str) -> Tensor:
    # The strides too: kernels return activations in the memory format of their inputs (channels_last).
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters and buffers on the meta device. Tied tensors stay tied."""
    tensors = [*model.parameters(), *model.buffers()]
    try:
        # deepcopy treats objects in its memo as copied already, so no weight is read.
        return copy.deepcopy(model, {id(tensor): _empty(tensor, "meta") for tensor in tensors})
    except Exception as error:
        must = f"must support copy.deepcopy, to be forecast ({type(error).__name__}: {error})"
        raise ConfigError([Problem("model", type(model).__name__, must, "Write level=0, 1, 2 or 3.")]) from error


def _shallow_copy(optimizer: Any) -> Any:
    """Return a copy of an optimizer instance that shares its tensors but has its own groups and state dicts."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    # Bypass the constructor, whose arguments are no longer known.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's wrapper, which is bound to the original
    # The forecast replaces the parameters in the groups and adds state, which the original must not see.
    set_own(twin, "param_groups", [dict(group) for group in optimizer.param_groups])
    set_own(twin, "state", defaultdict(dict, optimizer.state))
    return twin


def _forward(model: nn.Module, sample: Any, parameters: Sequence[inspect.Parameter]) -> tuple[Tensor, Any]:
    """Return (loss, outputs). If the model returns no scalar, the loss is the sum of its outputs' means."""
    if callable(sample):
        loss = sample(model)
        return loss, loss
    args, kwargs = _arguments(parameters, sample)
    outputs = model(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalar = next((leaf for leaf in leaves if leaf.dim() == 0), None)
    return sum((leaf.mean() for leaf in leaves), torch.zeros(())) if scalar is None else scalar, outputs


def _arguments(params: Sequence[inspect.Parameter], sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model from a loader's batch; labels after them are for the loss."""
    if isinstance(sample, Mapping):
        takes_all = any(param.kind is param.VAR_KEYWORD for param in params)
        names = {param.name for param in params}
        return (), {str(key): value for key, value in sample.items() if takes_all or key in names}
    if not isinstance(sample, tuple | list):
        return (sample,), {}
    if any(param.kind is param.VAR_POSITIONAL for param in params):
        return tuple(sample), {}
    positional = [param for param in params if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]
    taken = list(sample[: len(positional)])
    # Labels must not be passed as an optional argument, such as attn_mask of timm's forward(x, attn_mask=None).
    while taken and positional[len(taken) - 1].default is not inspect.Parameter.empty and _is_labels(taken[-1]):
        taken.pop()
    return tuple(taken), {}


def _is_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()
