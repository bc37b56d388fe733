"""Level 3 of fairscale: its FullyShardedDataParallel around every unit. CUDA only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.sharding.fairscale_engine.fsdp_unit import FsdpUnit
from vissl_zero.sharding.fairscale_engine.segment import Segment, segments_of
from vissl_zero.sharding.materialize import Fill
from vissl_zero.sharding.plan import ROOT, PlannedUnit, WrapPlan
from vissl_zero.sharding.precision import dtype_of
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.strategy import OptimizerFactory

_WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}  # what fairscale puts into names


class FlatSharded(ShardedModel):
    """A model of which each rank keeps a piece of every parameter, cut flat. See ``ShardedModel``.

    Gradients are reduced to pieces in every micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory | None,
        plan: ShardingPlan,
        wrap_plan: WrapPlan,
        device: torch.device,
        fill: Fill,
    ):
        order = {name: index for index, (name, _) in enumerate(module.named_parameters())}
        root, units = _wrap(module, plan, wrap_plan, device, fill)
        self._units: list[FsdpUnit] = []
        segments: list[Segment] = []
        for unit, its_segments in segments_of(root):
            assert isinstance(unit, FsdpUnit)
            unit.watch(its_segments)
            self._units.append(unit)
            segments += its_segments
        segments.sort(key=lambda segment: order[segment.name])
        wrap_plan = dataclasses.replace(wrap_plan, units=units, whole_bytes=_whole_bytes(plan, wrap_plan, units))
        group = dist.group.WORLD
        super().__init__(root, root, groups, build_optimizer, plan, wrap_plan, device, group, segments)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients of earlier micro-batches wait as pieces; nothing is left for the last one."""
        return nullcontext()

    def _shard_teacher(self, teacher: nn.Module, wrap_plan: WrapPlan, fill: Fill) -> ShardedModel:
        """See ``ShardedModel``."""
        return FlatSharded(teacher, (), None, self._plan, wrap_plan, self._device, fill)

    def describe(self) -> str:
        """See ``Sharded``."""
        num_joined = sum(unit._num_flatten_params for unit in self._units)
        return f"{super().describe()}\n  by fairscale; the parameters of {num_joined} units are joined into one each"

    def _before_shards_change(self) -> None:
        for unit in self._units:
            unit.drop_whole()

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super()._saved_buffers():
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), buffer


def _wrap(
    model: nn.Module, plan: ShardingPlan, wrap_plan: WrapPlan, device: torch.device, fill: Fill
) -> tuple[FsdpUnit, tuple[PlannedUnit, ...]]:
    """Wrap unit by unit, inner ones first, in place; the wrapped model, and the units as they came out.

    fairscale wraps one module at a time. Modules that a tied parameter binds are left to the unit around them.
    """
    # Groups of our own: fairscale would keep some in a cache that outlives the process group.
    timeout = timedelta(seconds=plan.timeout_s)
    groups = {
        "process_group": dist.new_group(timeout=timeout),
        "process_group_reduce_scatter": dist.new_group(timeout=timeout),
    }
    root: nn.Module = model
    units = []
    for unit in wrap_plan.units:
        if len(unit.modules) > 1:
            continue
        name = unit.modules[0]
        module = model.get_submodule(name)
        fill(module, name)
        module.to(device)
        # fairscale marks the parameters that inner units have taken.
        own = [param for param in module.parameters() if not hasattr(param, "_is_sharded")]
        if not own and name != ROOT:
            continue
        # Before wrapping: afterwards the wrapper would be among the parents.
        references = _references(model, module)
        options = groups | _options(unit, own, plan) | {"compute_device": device}
        root = FsdpUnit(module, plan.force_sync_cuda and not unit.is_float32, **options)
        units.append(dataclasses.replace(unit, num_params=sum(param.numel() for param in own)))
        for parent, child_name in references:
            parent._modules[child_name] = root
    assert isinstance(root, FsdpUnit)
    return root, tuple(units)


def _references(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every place where ``model`` holds ``module``: the parent, and the name of the child there."""
    return [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is module]


def _options(unit: PlannedUnit, own: Sequence[nn.Parameter], plan: ShardingPlan) -> dict[str, Any]:
    """fairscale's options of one unit."""
    precision = plan.precision
    is_mixed = precision.compute != precision.master and not unit.is_float32
    return {
        # As fairscale has it for batch norm: such a unit is small, and may be called once per resolution.
        "reshard_after_forward": plan.reshard_after_forward and not unit.is_float32,
        "mixed_precision": is_mixed,
        "compute_dtype": dtype_of(precision.compute if is_mixed else precision.master),
        "buffer_dtype": dtype_of(precision.master),
        "fp32_reduce_scatter": is_mixed and precision.reduce == precision.master,
        # fairscale joins parameters only where all of them are trained, or none is.
        "flatten_parameters": plan.flatten_parameters and len({param.requires_grad for param in own}) == 1,
        "bucket_cap_mb": plan.bucket_cap_mb,
        "clear_autocast_cache": plan.clear_autocast_cache,
        "verbose": plan.verbose,
    }


def _whole_bytes(plan: ShardingPlan, wrap_plan: WrapPlan, units: Sequence[PlannedUnit]) -> int:
    """See ``WrapPlan``; tied modules are whole with the root, and without resharding everything is, after forward."""
    itemsize = dtype_of(plan.precision.compute).itemsize
    if not plan.reshard_after_forward:
        return itemsize * sum(unit.num_params for unit in units)
    return wrap_plan.whole_bytes + itemsize * sum(unit.num_params for unit in wrap_plan.units if len(unit.modules) > 1)
