"""Level 3 of fairscale: its FullyShardedDataParallel around every unit. CUDA only.

FSDP flattens parameters, alone or joined with others, before it cuts them; a shard is one rank's part of one parameter.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fairscale.internal.containers import apply_to_tensors
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.data_parallel.fully_sharded_data_parallel import TrainingState
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.models.bare import Fill
from vissl_zero.models.model import is_recomputing
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import dtype_of
from vissl_zero.sharding.model.wrap_plan import ROOT, PlannedUnit, WrapPlan
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel
from vissl_zero.sharding.state.shard import MIN_ROW_NORM, Shard


@dataclass(eq=False, kw_only=True)
class FlatShard(Shard):
    """A run of elements of one parameter, which need not begin or end with a row.

    FSDP flattens a parameter, or all parameters of a unit joined end to end, and gives each rank a piece of equal size;
    the last pieces are padded. A segment is the part of one parameter in a piece. So norms, groups, frozen parameters
    and saved state are those of single parameters, joined or not, and padding is never trained.

    Attributes:
        source: fairscale's parameter: this rank's piece, except inside forward and backward.
        local: 1-d view of the segment in that piece.
        start: position of the segment in the piece.
        is_joined: whether the piece has other parameters too.
        has_grad: whether the loss has reached the parameter since its gradient was last forgotten. A joined parameter
            always has a gradient, which may be zero.
    """

    start: int
    is_joined: bool
    has_grad: bool

    def local_grad(self) -> Tensor | None:
        """Return this rank's gradient; see ``Shard``."""
        grad = self.source.grad
        if grad is None or not self.has_grad:
            return None
        return grad.reshape(-1)[self.start : self.start + self.local.numel()]

    def forget_grad(self) -> None:
        """Forget the gradient; see ``Shard``."""
        super().forget_grad()
        self.has_grad = not self.is_joined

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Gather the parameter; see ``Shard``. Costs one all-reduce of it."""
        # Each element is in the piece of one rank, so the sum over ranks is the parameter.
        flat = self.local.new_zeros(self.full_shape.numel())
        flat[self.first_element : self.first_element + self.local.numel()] = self.local
        dist.all_reduce(flat)
        return flat.view(self.full_shape)

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Set rows to unit length; see ``Shard``. Costs one all-reduce of a number per row."""
        places = torch.arange(self.local.numel(), device=self.local.device) + self.first_element
        # Pieces are cut anywhere, so a row's norm may be a sum over ranks.
        rows = places // self.full_shape[1:].numel()
        squares = self.local.new_zeros(self.full_shape[0]).index_add_(0, rows, self.local.square())
        dist.all_reduce(squares)
        self.local.div_(squares.sqrt().clamp_(min=MIN_ROW_NORM)[rows])


def _segments_of(
    root: FullyShardedDataParallel,
) -> Iterator[tuple[FullyShardedDataParallel, list[FlatShard]]]:
    """Yield the units under ``root``, each with this rank's segments of its parameters. Not a collective.

    Segments have full names (a tied parameter its first name) and are in the unit's order.
    """
    units = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    for unit, facts in zip(units, root.local_metadata_dict()["param_metadata"], strict=True):
        segments: list[FlatShard] = []
        for source, pieces in zip(unit.params, facts["params"].values(), strict=True):
            names = [f"{facts['fsdp_path']}.{name}".lstrip(".") for name in pieces["names"]]
            segments += _cut(source, names, pieces["shapes"])
        yield unit, segments


def _cut(source: nn.Parameter, names: list[str], shapes: list[torch.Size]) -> Iterator[FlatShard]:
    """Yield the segments in this rank's piece of parameters that are joined in the given order."""
    piece = source.detach().view(-1)
    begin = dist.get_rank() * piece.numel()
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        first = min(max(begin - offset, 0), shape.numel())
        stop = min(max(begin + piece.numel() - offset, 0), shape.numel())
        # A parameter in another rank's piece has an empty segment here, so that all ranks have the same names.
        start = offset + first - begin if first < stop else 0
        local = nn.Parameter(piece[start : start + stop - first], requires_grad=source.requires_grad)
        yield FlatShard(
            name, source, local, shape, first, start=start, is_joined=len(names) > 1, has_grad=len(names) == 1
        )
        offset += shape.numel()


# fairscale 0.4.13, its last version, uses functions that torch has renamed since; both names work.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is a private function",
    category=FutureWarning,
)


class FsdpUnit(FullyShardedDataParallel):
    """One unit of the wrap plan.

    Differences from fairscale: activation checkpointing around a unit may run it again in the backward pass, inputs are
    cast to the compute dtype, the loss need not depend on all parameters, and the joined parameters that it does depend
    on are recorded.

    Args:
        module: the layers; parameters of inner units stay with these.
        use_sync: wait for the GPU before and after each forward pass.
        options: options of fairscale's class.
    """

    def __init__(self, module: nn.Module, use_sync: bool, **options: Any):
        super().__init__(module, **options)
        self._use_sync = use_sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters and run the module."""
        if is_recomputing():
            # Called in the middle of the backward pass, fairscale's own forward would reset this unit's state:
            # it would free the parameters that the backward pass is about to use. That pass frees them at its end.
            self._rebuild_full_params()
            return self.module(*args, **kwargs)
        if self._use_sync:
            torch.cuda.synchronize()
        if self.mixed_precision:
            # At the root fairscale itself would cast to float16, whatever the compute dtype is.
            args, kwargs = apply_to_tensors(self._cast, args), apply_to_tensors(self._cast, kwargs)
        outputs = super().forward(*args, **kwargs)
        if self._use_sync:
            torch.cuda.synchronize()
        return outputs

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Check the state as fairscale does, but accept units that the loss did not use at the end of backward."""
        is_unused = self.training_state in (TrainingState.IDLE, TrainingState.BACKWARD_PRE)
        if not (state is TrainingState.BACKWARD_POST and is_unused):
            super().assert_state(state)

    def _lazy_init(self) -> None:
        """Initialize as fairscale does, but all units: the end of backward visits units that were never called too."""
        is_first = self._is_root is None
        super()._lazy_init()
        if is_first and self._is_root:
            for unit in self.modules():
                if isinstance(unit, FsdpUnit):
                    for param in unit.params:
                        unit._init_param_attributes(param)

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """Gather the parameters for the backward pass before any of it runs, whichever output it comes from.

        fairscale hooks the outputs one by one. It skips an output whose ``id`` it has registered for an inner unit, but
        ids of freed tensors are reused: now and then a backward pass would find parameters freed.
        """
        if self._output_pre_backward_hook_registered is not None:
            self._output_pre_backward_hook_registered.clear()
        return super()._register_pre_backward_hooks(_joined(outputs))

    def _prep_grads_for_backward(self) -> None:
        """Prepare as fairscale does, after setting reduced gradients of one element aside.

        fairscale tells a reduced gradient from an unreduced one by its shape, which is the same for one element. It
        would add the next micro-batch's gradient, and reduce the sum a second time.
        """
        for param in self.params:
            if param._is_sharded and param.grad is not None and param.grad.shape == param._fp32_shard.shape:
                param._saved_grad_shard, param.grad = param.grad.data, None
        super()._prep_grads_for_backward()

    def _wait_for_post_backward(self) -> None:
        """Wait as fairscale does, after freeing the root's parameters, which it leaves full if backward missed them."""
        self.drop_whole()
        super()._wait_for_post_backward()

    def watch(self, segments: Sequence[FlatShard]) -> None:
        """Record in ``segments``, those of this unit, which parameters the loss reaches.

        The gradient of joined parameters has zeros for the others, which look like gradients of zero.
        """
        if any(segment.is_joined for segment in segments):
            inner = self.module.module
            inner.register_forward_pre_hook(lambda *_: _watch(inner._unflattened_param_views, segments))

    def drop_whole(self) -> None:
        """Free full parameters that an earlier forward pass has kept, because the shards are about to change."""
        if self.has_full_params or (self._is_root and self.params):
            self._free_full_params()
            self._use_fp32_param_shard()


class _Joined(torch.autograd.Function):
    """The identity. Its backward pass runs once the gradients of all its outputs have arrived. No copy."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An output without a gradient passes on None, not zeros.
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - autograd's signature
        return grads


def _joined(outputs: Any) -> Any:
    """Pass all tensors of ``outputs`` that require a gradient through one node of the graph."""
    pieces: list[Tensor] = []
    apply_to_tensors(lambda tensor: pieces.append(tensor) if tensor.requires_grad else None, outputs)
    if len(pieces) < 2 or not torch.is_grad_enabled():
        return outputs
    joined = iter(_Joined.apply(*pieces))
    return apply_to_tensors(lambda tensor: next(joined) if tensor.requires_grad else tensor, outputs)


def _watch(views: Sequence[Tensor], segments: Sequence[FlatShard]) -> None:
    for view, segment in zip(views, segments, strict=True):
        if view.requires_grad and view.grad_fn is not None:
            view.register_hook(_marker(segment))


def _marker(segment: FlatShard) -> Callable[[Tensor], None]:
    def mark(grad: Tensor) -> None:
        segment.has_grad = True

    return mark


_WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}  # modules that fairscale's wrappers add to full names


class FlatSharded(ShardedModel):
    """A model of which each rank keeps a piece of every parameter, cut flat. See ``ShardedModel``.

    Gradients are reduced to pieces in every micro-batch.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        order = {name: index for index, (name, _) in enumerate(module.named_parameters())}
        root, units = _wrap(module, plan, setup.wrap_plan, setup.device, setup.fill)
        self._units: list[FsdpUnit] = []
        segments: list[FlatShard] = []
        for unit, unit_segments in _segments_of(root):
            assert isinstance(unit, FsdpUnit)
            unit.watch(unit_segments)
            self._units.append(unit)
            segments += unit_segments
        # Units list inner modules first; shards have the order of the model on every engine.
        segments.sort(key=lambda segment: order[segment.name])
        whole_bytes = _whole_bytes(plan, setup.wrap_plan, units)
        wrap_plan = dataclasses.replace(setup.wrap_plan, units=units, whole_bytes=whole_bytes)
        group = dist.group.WORLD
        super().__init__(dataclasses.replace(setup, module=root, wrap_plan=wrap_plan), group, segments)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return an empty context: every micro-batch reduces its gradients to pieces, which add up."""
        return nullcontext()

    def _shard_teacher(self, setup: ModelSetup) -> ShardedModel:
        """Shard a teacher; see ``ShardedModel``."""
        return FlatSharded(setup)

    def describe(self) -> str:
        """Describe the plan; see ``ShardedModel``."""
        num_joined = sum(unit._num_flatten_params for unit in self._units)
        return f"{super().describe()}\n  by fairscale; the parameters of {num_joined} units are joined into one each"

    def plain_state(self, of_teacher: bool) -> dict[str, Any]:
        """Gather the state; see ``ShardedModel``. The model's hooks and extra state are left out."""
        return self.full_teacher_state() if of_teacher else self.full_state()

    def _before_shards_change(self) -> None:
        for unit in self._units:
            unit.drop_whole()

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super()._saved_buffers():
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), buffer


def _wrap(
    model: nn.Module, plan: ShardingPlan, wrap_plan: WrapPlan, device: torch.device, fill: Fill
) -> tuple[FsdpUnit, tuple[PlannedUnit, ...]]:
    """Wrap unit by unit, inner units first, in place; return the wrapped model and the units as wrapped.

    fairscale wraps one module at a time, so modules with tied parameters belong to the unit around them.
    """
    # Groups of our own: fairscale would cache its groups, beyond the life of the process group.
    names = "process_group", "process_group_reduce_scatter"
    groups = {name: collectives.new_group(plan.timeout_s) for name in names}
    root: nn.Module = model
    units = []
    for unit in wrap_plan.units:
        if len(unit.modules) > 1:
            continue
        name = unit.modules[0]
        module = model.get_submodule(name)
        fill(module, name)
        module.to(device)
        # fairscale marks the parameters of inner units.
        params = [param for param in module.parameters() if not hasattr(param, "_is_sharded")]
        if not params and name != ROOT:
            continue
        # Before wrapping: afterward the wrapper would be one of the parents.
        references = [
            (parent, child_name)
            for parent in model.modules()
            for child_name, child in parent._modules.items()
            if child is module
        ]
        options = groups | _options(unit, params, plan) | {"compute_device": device}
        root = FsdpUnit(module, plan.force_sync_cuda and not unit.is_float32, **options)
        units.append(dataclasses.replace(unit, num_params=sum(param.numel() for param in params)))
        for parent, child_name in references:
            parent._modules[child_name] = root
    assert isinstance(root, FsdpUnit)
    return root, tuple(units)


def _options(unit: PlannedUnit, params: Sequence[nn.Parameter], plan: ShardingPlan) -> dict[str, Any]:
    """Build fairscale's options of one unit."""
    precision = plan.precision
    is_mixed = precision.casts_parameters and not unit.is_float32
    return {
        # As in fairscale's own wrapping of batch norm: such a unit is small, and may be called once per resolution.
        "reshard_after_forward": plan.reshard_after_forward and not unit.is_float32,
        "mixed_precision": is_mixed,
        "compute_dtype": dtype_of(precision.compute if is_mixed else precision.master),
        "buffer_dtype": dtype_of(precision.master),
        "fp32_reduce_scatter": is_mixed and precision.reduce == precision.master,
        # fairscale joins parameters only where all of them are trained, or none is.
        "flatten_parameters": plan.flatten_parameters and len({param.requires_grad for param in params}) == 1,
        "bucket_cap_mb": plan.bucket_cap_mb,
        "clear_autocast_cache": plan.clear_autocast_cache,
        "verbose": plan.verbose,
    }


def _whole_bytes(plan: ShardingPlan, wrap_plan: WrapPlan, units: Sequence[PlannedUnit]) -> int:
    """Return bytes as ``WrapPlan`` does. Tied modules are gathered with the root; without resharding, all stay full."""
    itemsize = dtype_of(plan.precision.compute).itemsize
    if not plan.reshard_after_forward:
        return itemsize * sum(unit.num_params for unit in units)
    return wrap_plan.whole_bytes + itemsize * sum(unit.num_params for unit in wrap_plan.units if len(unit.modules) > 1)
