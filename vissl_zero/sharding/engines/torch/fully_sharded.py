"""Levels 1 to 3: one mechanism, torch's ``fully_shard``; the level is only *when* things are gathered and reduced.

Level 3 frees the full parameters of a unit after its forward pass and gathers them again for its backward pass. Levels
1 and 2 keep them until the end of the step's last backward pass. Level 2 reduces gradients to shards in every backward
pass; level 1 keeps them whole, without communication, until the last one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.models.bare import Fill
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator, open_communicator
from vissl_zero.sharding.engines.gradient_average import OrderedMeans, OrderedReduceScatter
from vissl_zero.sharding.engines.torch.unit_guard import FREED, OF_PARAMETERS, UnitGuard, guard_modules, require_units
from vissl_zero.sharding.engines.torch.unit_transfers import (
    PackedAllGather,
    UnitOnDisk,
    packing_of,
    planned_shards,
    use_communicator,
)
from vissl_zero.sharding.model.float8 import sent_weights
from vissl_zero.sharding.model.precision import cast_tensors, dtype_of
from vissl_zero.sharding.model.wrap_plan import PlannedUnit, WrapPlan
from vissl_zero.sharding.offload.parameter_store import (
    DiskShard,
    HostShard,
    ParameterStore,
    disk_shard,
    host_shard,
    needs_host_shards,
)
from vissl_zero.sharding.offload.tier import offloaded, stored_parameters
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel
from vissl_zero.sharding.state.shard import Shard, hide_gradient, shards_of, wide_dtype
from vissl_zero.sharding.state.sharded_tensor import WHOLE_LEVELS, ReplacedParameter, ShardedTensor, mean_rows
from vissl_zero.sharding.torch_private import (
    forget_backward,
    forget_meshes,
    group_of,
    has_begun_backward,
    lazy_init,
    modules_of,
    real_grad,
    reduce_by_dtype,
    set_real_grad,
    unit_state,
)

_FAILED = (
    "A backward pass raised, and its gradients are incomplete. Call optimizer.zero_grad() after the error, before the "
    "next forward pass."
)


class FullySharded(ShardedModel):
    """A model of which each rank keeps a part. See ``ShardedModel``.

    Attributes:
        comm: communicator of the ranks of a shard group on the CPU; None on GPUs, which use nccl's collectives.
    """

    def __init__(self, setup: ModelSetup):
        setup = replace(setup, wrap_plan=_with_units_of_others(setup))
        module, plan, device, build_optimizer = setup.module, setup.plan, setup.device, setup.build_optimizer
        mesh = _mesh(device, setup.wrap_plan.num_ranks, plan.timeout_s)
        trained = setup.trained
        self._own_store: ParameterStore | None = None  # a teacher's: a trained model's optimizer closes its store
        # Planned before any unit is wrapped: each unit's shards move to the store's file before the next unit is
        # initialized.
        store = stored_parameters(planned_shards(module, setup.wrap_plan, trained, mesh), plan.offload_params)
        _refuse_scripted(module)
        _guard_padding(module)
        with ExitStack() as undo:
            if store is not None:
                undo.callback(store.close)  # a refused model would leave its files on the disk
            _wrap(module, plan, setup.wrap_plan, mesh, store, setup.fill)
            wrapped = [module for module in module.modules() if isinstance(module, FSDPModule)]
            guard_modules(wrapped, plan.precision.casts_parameters)
            # Modules that are bound by a tied parameter are one unit.
            self._units = list({unit_state(unit): unit for unit in wrapped}.values())
            self._is_last = True
            # Replicated parameters belong to no unit, so their gradients travel apart from those of units.
            self._replicated_means: OrderedMeans | None = None
            if plan.deterministic:
                self._replicated_means = OrderedMeans([*filter(_is_replicated, module.parameters())])
            group = mesh.get_group(mesh.ndim - 1)
            self.comm: CpuCommunicator | None = None
            if device.type == "cpu" and group.size() > 1:
                self.comm = open_communicator(group, plan.timeout_s)
            names = {submodule: name or "(model)" for name, submodule in module.named_modules()}
            titles = [" + ".join(map(names.__getitem__, modules_of(unit_state(unit)))) for unit in self._units]
            # The communicator compares the order of units at once, but only among the ranks of a shard group.
            is_recording = self.comm is None or group.size() < dist.get_world_size()
            # Levels 1 and 2 gather once a step, and level 3 in every pass.
            sent = sent_weights(module) if plan.level == 3 else set()
            self._guard = UnitGuard(titles, self._units, self.comm, is_recording=is_recording, sent=sent)
            if self.comm is not None:
                # Without kept buffers for a teacher on a disk: they add a unit to the three that the student holds.
                announce, keeps_buffers = self._guard.announce, store is None or build_optimizer is not None
                self._comm_buffers = use_communicator(self._units, self.comm, announce, keeps_buffers, sent)
            else:
                _use_collectives(self._units, group.size(), plan.deterministic, sent)
            shards = [disk_shard(shard, store) for shard in shards_of(module, group)]
            if build_optimizer is not None:
                shards = [hide_gradient(shard) if _is_replicated(shard.source) else shard for shard in shards]
            if needs_host_shards(plan, device):
                pin = plan.offload_optimizer.pin_memory and device.type == "cuda"
                shards = [host_shard(shard, pin) if shard.name in trained else shard for shard in shards]
            _show_to_loop(shards, self._guard)
            if build_optimizer is not None:
                build_optimizer = offloaded(build_optimizer, plan, store, shards)
            elif store is not None:
                self._own_store = store
            super().__init__(replace(setup, build_optimizer=build_optimizer), group, shards, comm=self.comm)
            _guard_loading(module, self._before_shards_change)
            # Now, not in the first forward pass: torch makes the first unit that runs the root, and a loop may call an
            # inner one first.
            self._roots = _outermost(module)
            for root in self._roots:
                lazy_init(root)
            # Nothing failed, so the store stays open; the optimizer, or ``close`` of a teacher, closes it.
            undo.pop_all()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Keep parameters whole between micro-batches at levels 1 and 2, and gradients at level 1. A context.

        Where the order of sums is fixed, level 1 reduces in every micro-batch, as level 2 does.
        """
        # Only on a change: the calls visit every unit.
        if is_last != self._is_last:
            for unit in self._units:
                if self._plan.level == 1 and not self._plan.deterministic:
                    unit.set_requires_gradient_sync(is_last, recurse=False)
                if self._plan.level < 3:
                    unit.set_reshard_after_backward(is_last, recurse=False)
            self._is_last = is_last
        with nullcontext() if self._replicated_means is None else self._replicated_means.micro_batch():
            yield
        # Not in a finally: after an error on this rank, the collective would wait for the others until its timeout.
        self._guard.end_micro_batch()

    def zero_grad(self) -> None:
        """Zero the gradients, also those of a backward pass that raised; see ``ShardedModel``."""
        for root in filter(_has_failed, self._roots):
            forget_backward(root, self._units)
        super().zero_grad()
        self._guard.forget()

    def _problem(self) -> str | None:
        """Return why there must be no update; see ``ShardedModel``."""
        return _FAILED if any(map(_has_failed, self._roots)) else super()._problem()

    def close(self) -> None:
        """Close the store; see ``ShardedModel``."""
        super().close()
        if self._own_store is not None:
            self._own_store.close()

    def _shard_teacher(self, setup: ModelSetup) -> ShardedModel:
        """Shard a teacher; see ``ShardedModel``."""
        return FullySharded(setup)

    def _buffers_in_use(self) -> list[Tensor]:
        """List the buffers; see ``ShardedModel``."""
        return [*self._comm_buffers(), *self.comm.buffers()] if self.comm else []

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # torch's message names neither the cause in the user's loop nor a fix.
            if "storage of size 0" in str(error):
                raise VisslZeroError(FREED) from error
            raise

    def _facts(self) -> dict[str, int]:
        """Collect the facts; see ``ShardedModel``."""
        what = "which units they ran, or in which order. All ranks must run the same ones, or use level 0"
        return super()._facts() | {what: self._guard.order()}

    def _has_gradients(self) -> list[bool]:
        """Return whether this rank had each gradient; see ``ShardedModel``. Ranks without one were given zeros."""
        sources = [shard.source for shard in self._trained]
        return [not isinstance(source, DTensor) or self._guard.has_gradient(source) for source in sources]

    def _average_replicated(self) -> None:
        """Average the gradients of replicated parameters, which ``fully_shard`` ignores. Cost: one small all-reduce."""
        params = [shard.source for shard in self._trained if _is_replicated(shard.source)]
        if not params or self._replicated_means is not None:
            return
        grads = [real_grad(param) for param in params]
        present, device = [grad is not None for grad in grads], params[0].device
        filled = [torch.zeros_like(param) if grad is None else grad for param, grad in zip(params, grads, strict=True)]
        # Only a rank that lacks a gradient copies flags to the device and reads them back: both wait for the device.
        flags = torch.ones(len(params), device=device) if all(present) else torch.tensor(present, device=device)
        # One dtype, so that parameters of different dtypes share one message, and half precision is rounded once.
        dtype = wide_dtype(params)
        message = torch.cat([piece.flatten().to(dtype) for piece in (flags, *filled)])
        # Over all ranks, not the shard group: every rank of the world holds them.
        dist.all_reduce(message)
        num_present, *totals = message.split([len(params), *(param.numel() for param in params)])
        for param, total, number in zip(params, totals, present if all(present) else num_present.tolist(), strict=True):
            # A gradient that no rank has stays None: zeros would let decay and momentum move the parameter.
            if number:
                set_real_grad(param, (total / dist.get_world_size()).view(param.shape).to(param.dtype))

    def _before_shards_change(self) -> None:
        """Reshard all units: at levels 1 and 2 a forward pass without gradient leaves them gathered, soon stale."""
        require_units(self._units)
        for unit in self._units:
            unit.reshard()


def _outermost(module: nn.Module) -> list[FSDPModule]:
    """List the outermost units: the model itself, or each model of a container."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in _outermost(child)]


def _has_failed(root: FSDPModule) -> bool:
    """Check, between passes, whether the last backward pass through the model raised."""
    return has_begun_backward(unit_state(root))


def _is_replicated(param: nn.Parameter) -> bool:
    """Check whether every rank holds the full parameter; one without elements does not count."""
    return not isinstance(param, DTensor) and param.numel() > 0


def _show_to_loop(shards: Sequence[Shard], guard: UnitGuard) -> None:
    """Connect sharded parameters to their stored values, and let losses read them directly."""
    for index, shard in enumerate(shards):
        if isinstance(shard.source, ShardedTensor):
            if isinstance(shard, DiskShard | HostShard):
                shard.source.store = shard
            if shard.source.is_floating_point():
                is_trained = shard.source.requires_grad
                # A loop may thaw a frozen parameter later; torch hooks only a tensor that requires a gradient.
                shard.source.requires_grad_(True).register_hook(_penalty_hook(shard, index, guard))
                shard.source.requires_grad_(is_trained)


def _penalty_hook(shard: Shard, index: int, guard: UnitGuard) -> Callable[[Tensor], Tensor]:
    """Return a hook for gradients that reach a shard itself, from a loss that reads the parameter directly.

    Gradients of the forward pass reach the full parameter instead.
    """
    # A hook that held its parameter would keep the model until garbage collection. Not of the parameter itself:
    # torch.utils.swap_tensors refuses tensors that have weak references.
    reference = weakref.ref(shard)

    def average(grad: Tensor) -> Tensor:
        alive = reference()
        assert alive is not None
        source = alive.source
        assert isinstance(source, ShardedTensor)
        if source.store is not None:
            raise VisslZeroError(OF_PARAMETERS)
        guard.announce_penalty(index, source)
        return mean_rows(source, grad)

    return average


def _guard_loading(module: nn.Module, before: Callable[[], None]) -> None:
    """Make ``load_state_dict`` call ``before`` first, and refuse ``assign=True``, which would replace parameters."""
    module.register_load_state_dict_pre_hook(lambda *_: before())
    for submodule in module.modules():
        # Every module, not the root alone: a loop may load a submodule by itself.
        submodule.register_load_state_dict_pre_hook(_refuse_assignment)


def _refuse_assignment(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise VisslZeroError(
            "load_state_dict(assign=True) would put other parameters in the place of sharded ones. Leave assign out: "
            "values are then written into them."
        )


def _guard_padding(module: nn.Module) -> None:
    """Make ``nn.TransformerEncoder`` refuse padded evaluation: only on plain tensors does torch zero the padding."""
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder) and getattr(encoder, "use_nested_tensor", False):
            encoder.register_forward_pre_hook(_refuse_padding, with_kwargs=True)


def _refuse_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # forward(src, mask, src_key_padding_mask). The fast path runs in evaluation without gradients only.
    mask = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    if mask is not None and not (encoder.training or torch.is_grad_enabled()):
        raise VisslZeroError(
            "nn.TransformerEncoder zeroes padded positions in evaluation, and does not where parameters are sharded. "
            "Build it with enable_nested_tensor=False, which keeps them at every level."
        )


def _refuse_scripted(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            must = "must not be compiled by torch.jit where parameters are sharded: its parameters cannot be replaced"
            fix = f"Give the module that it was compiled from, or use {WHOLE_LEVELS}."
            raise ConfigError([Problem(name or "model", type(part).__name__, must, fix)])


def _mesh(device: torch.device, num_shards: int, timeout_s: float) -> DeviceMesh:
    """Build a mesh of all ranks in one dimension, or replicas x shards where a shard group is less than the world."""
    # A process may train in several worlds, one after the other, as tests and notebooks do.
    forget_meshes()
    world_size = dist.get_world_size()
    if num_shards == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    places = torch.arange(world_size).view(-1, num_shards)
    timeout = timedelta(seconds=timeout_s)  # a mesh that makes its own groups gives them torch's half hour
    # Collectives of the world: every rank creates all groups, replicas (columns of places) before shards (rows).
    replicas, _ = dist.new_subgroups_by_enumeration(places.T.tolist(), timeout=timeout)
    shards, _ = dist.new_subgroups_by_enumeration(places.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicas, shards], device.type, places, mesh_dim_names=("replicate", "shard"))


def _wrap(
    module: nn.Module,
    plan: ShardingPlan,
    wrap_plan: WrapPlan,
    mesh: DeviceMesh,
    store: ParameterStore | None,
    fill: Fill,
) -> None:
    """Apply ``fully_shard`` unit by unit, inner units first, and move each unit's shards to ``store``. In place."""
    # fully_shard cuts the first dimension, which scalars lack.
    replicated = {param for param in module.parameters() if param.dim() == 0 or param.numel() == 0}
    # Before the first unit: a replicated parameter may be tied across units, and each must ignore it.
    replicated |= _replicate(module, plan, wrap_plan, fill)
    for position, unit in enumerate(wrap_plan.units):
        if unit.is_replicated:
            continue
        modules = [module.get_submodule(name) for name in unit.modules]
        for name, part in zip(unit.modules, modules, strict=True):
            # Unit by unit, so that a rank never holds all full parameters.
            fill(part, name)
            for param in part.parameters():
                if not param.is_contiguous():  # channels_last weights, which fully_shard refuses
                    param.data = param.data.contiguous()
        replaced = [_Replaced(part, name, param) for part in modules for name, param in part.named_parameters()]
        fully_shard(
            modules[0] if len(modules) == 1 else modules,
            mesh=mesh,
            reshard_after_forward=plan.level == 3,
            mp_policy=_policy(unit, plan.precision),
            ignored_params=replicated,
            offload_policy=_offload_policy(plan, mesh),
        )
        for old in replaced:
            old.mark()
        group = group_of(unit_state(modules[0]))
        if group is not None and len({param.sharded_param.dtype for param in group.fsdp_params}) > 1:
            reduce_by_dtype(group)
        if store is not None:
            # Names are looked up again: fully_shard has just replaced the unit's parameters.
            names = {param: name for name, param in module.named_parameters()}
            UnitOnDisk(modules[0], position, names, store)
    for param in replicated:
        # fully_shard moves the parameters that it shards to the device, and not those that it ignores.
        param.data = param.data.to(mesh.device_type)


def _with_units_of_others(setup: ModelSetup) -> WrapPlan:
    """Shard batch norms that another optimizer trains: our ``step`` averages replicated ones too late for it."""
    trained = setup.trained
    names = {param: name for name, param in setup.module.named_parameters()}

    def is_of_another(unit: PlannedUnit) -> bool:
        params = [param for name in unit.modules for param in setup.module.get_submodule(name).parameters()]
        return any(param.requires_grad and names[param] not in trained for param in params)

    units = (
        replace(unit, is_replicated=False) if unit.is_replicated and is_of_another(unit) else unit
        for unit in setup.wrap_plan.units
    )
    return replace(setup.wrap_plan, units=tuple(units))


def _replicate(module: nn.Module, plan: ShardingPlan, wrap_plan: WrapPlan, fill: Fill) -> set[nn.Parameter]:
    """Initialize the batch norms that stay whole on every rank; return their parameters."""
    master, compute = dtype_of(plan.precision.master), dtype_of(plan.precision.compute)
    params: set[nn.Parameter] = set()
    for name in (name for unit in wrap_plan.units if unit.is_replicated for name in unit.modules):
        part = module.get_submodule(name)
        fill(part, name)
        # torch's batch norm accepts half-precision inputs with float32 parameters, but not with float64 ones.
        if master == torch.float64:
            part.register_forward_pre_hook(lambda _, *arguments: cast_tensors(arguments, master), with_kwargs=True)
        if plan.precision.casts_parameters:
            # The next layer of the unit around it has gathered weights in half precision, and needs inputs of that
            # dtype.
            part.register_forward_hook(lambda *call: cast_tensors(call[-1], compute))
        params.update(part.parameters())
    return params


class _Replaced:
    """A full parameter before ``fully_shard`` replaces it: ``mark`` copies its attributes, and forbids its use."""

    def __init__(self, part: nn.Module, name: str, param: nn.Parameter):
        self._part, self._name, self._flags = part, name, dict(vars(param))
        self._find = weakref.ref(param)  # a strong reference would keep every full parameter in memory

    def mark(self) -> None:
        old, new = self._find(), self._part.get_parameter(self._name)
        if old is not new:
            vars(new).update({key: value for key, value in self._flags.items() if key not in vars(new)})
            if type(old) is nn.Parameter:
                old.__class__ = ReplacedParameter


def _use_collectives(
    units: Sequence[FSDPModule], num_ranks: int, is_ordered: bool, sent: Collection[nn.Parameter]
) -> None:
    """Replace torch's collectives of units without a CPU communicator: ordered sums, packed gathers of float8."""
    for unit in units:
        if is_ordered:
            unit.set_custom_reduce_scatter(OrderedReduceScatter())  # type: ignore[arg-type]
        if num_ranks > 1 and (packing := packing_of(unit, sent)):
            unit.set_custom_all_gather(PackedAllGather(packing))  # type: ignore[arg-type]


def _offload_policy(plan: ShardingPlan, mesh: DeviceMesh) -> OffloadPolicy:
    """Choose torch's CPU offload for shards of a model on a GPU. Gradients and the update then move to the host too."""
    if plan.offload_params.device == "none" or mesh.device_type == "cpu":
        return OffloadPolicy()
    # Copies from pinned memory are asynchronous, and ``UnitOnDisk`` drops a shard once it is gathered: tier cpu only.
    is_pinned = plan.offload_params.pin_memory and plan.offload_params.device == "cpu"
    return CPUOffloadPolicy(pin_memory=is_pinned)


def _policy(unit: PlannedUnit, precision: Precision) -> MixedPrecisionPolicy:
    master, compute, reduce = map(dtype_of, (precision.master, precision.compute, precision.reduce))
    if unit.is_float32:  # a batch norm with tied weights; others are replicated
        # Inputs and weights in the master dtype, outputs as the layers around it compute.
        return MixedPrecisionPolicy(param_dtype=master, reduce_dtype=master, output_dtype=compute)
    if not precision.casts_parameters:
        return MixedPrecisionPolicy(reduce_dtype=None if reduce == master else reduce)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
